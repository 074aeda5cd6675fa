"""The claim loop of one instance, and the steps of a batch from its claim to its end."""
