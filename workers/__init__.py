"""The worker side: processes that hold engines and claim their batches. See ``workers.app``."""
