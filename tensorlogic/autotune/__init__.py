"""Measuring candidates, and choosing among them by their times."""
