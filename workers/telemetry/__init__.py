"""What a worker tells the outside: events, status, logs."""
