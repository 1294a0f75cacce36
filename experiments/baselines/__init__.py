"""Rivals: one file a method."""
