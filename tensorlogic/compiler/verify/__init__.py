"""Does a rewritten graph compute what the model computes."""
