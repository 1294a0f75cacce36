"""Files: atomic writing, reading without trust, factors, checkpoints."""
