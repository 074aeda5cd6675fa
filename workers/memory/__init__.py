"""How many rows fit: what an instance learns of it, keeps, and tells the others."""
