"""Experiments: the tables and figures, one folder each, and the networks they share."""
