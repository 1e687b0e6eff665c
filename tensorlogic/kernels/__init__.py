"""Kernels and their launchers, by what they compute; one folder a family."""
