"""Factors and a batch in, influence of every label out."""
