"""Device functions by which row kernels load and store: contiguous, ragged, strided, split, in shared memory."""
