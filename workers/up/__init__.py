"""A whole fleet on one machine: `fleet up`, and the server and address that it keeps."""
