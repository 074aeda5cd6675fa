"""Groups of `fleet` commands that have a file of their own; `producer.cli` mounts them."""
