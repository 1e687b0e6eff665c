"""Inductor as a competitor: compiled aside, compared, taken where faster."""
