"""enable(): half-precision CPU kernels of ours in front of PyTorch's."""
