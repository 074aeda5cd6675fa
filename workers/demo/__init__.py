"""`fleet demo`: an app's view of a whole fleet on one machine. Start at ``run``."""
