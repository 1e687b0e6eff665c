"""Matrix products with prologues and epilogues: Triton, Hopper, cuBLASLt."""
