"""Which score of strange inputs is the safe default."""
