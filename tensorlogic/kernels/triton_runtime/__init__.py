"""Compiling, loading and launching Triton kernels, and device functions that all of them share."""
