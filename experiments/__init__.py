"""Experiments: one folder per study, the baselines, and the data, networks and training they share."""
