"""Sums, means, maxima and minima, and the gradients of the latter two."""
