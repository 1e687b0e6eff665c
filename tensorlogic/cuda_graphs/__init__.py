"""capture: CUDA graphs recorded once and replayed safely."""
