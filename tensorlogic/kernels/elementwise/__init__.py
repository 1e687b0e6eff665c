"""Element-wise kernels, their gradients, and passes behind a product."""
