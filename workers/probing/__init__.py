"""What is proved of a model before it serves: rows may share a run, and may be padded for it."""
