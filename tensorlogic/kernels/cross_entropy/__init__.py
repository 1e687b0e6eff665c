"""Softmax cross-entropy, forward, backward and both in one pass."""
