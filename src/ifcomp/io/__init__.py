"""Files: atomic writes and locks, safe reading, factors, and checkpoints of unfinished work."""
