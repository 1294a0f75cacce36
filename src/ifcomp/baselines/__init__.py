"""What users would pick instead: every baseline of the paper behind a small interface, one file a method."""
