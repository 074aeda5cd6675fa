"""A worker's parent process: it holds leases, keeps the instance processes, and decodes no job."""
