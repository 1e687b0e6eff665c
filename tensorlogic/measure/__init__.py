"""Timing and checking one launcher, undisturbed."""
