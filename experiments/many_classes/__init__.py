"""Predictions and OOD detection with a hundred classes: estimates compared with the evaluation of every label."""
