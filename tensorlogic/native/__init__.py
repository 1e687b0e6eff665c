"""The C++ libraries: CPU kernels, compiled calls, hooks into PyTorch, the CUDA driver."""
