"""Which GPUs, MIG slices and CPU slots exist, and who may use them."""
