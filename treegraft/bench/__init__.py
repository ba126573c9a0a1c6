"""Comparisons, checks and the demo, as library calls."""
