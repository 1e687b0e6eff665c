"""Kernels and helpers that at least two ops use."""
