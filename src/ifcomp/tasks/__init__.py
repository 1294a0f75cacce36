"""What scores are used for: sees only score tables and arrays, never a model."""
