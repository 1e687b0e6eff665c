"""Softmax of rows and strided lines, forward and backward."""
