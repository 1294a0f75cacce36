"""Coverage and size of prediction sets."""
