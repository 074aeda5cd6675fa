"""`fleet doctor`: whether this machine, its server and its models are fit for the fleet."""
