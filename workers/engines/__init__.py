"""Engines: the only files that import a runtime, each on demand. Start at ``base``."""
