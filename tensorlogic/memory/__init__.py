"""Memory that is used again: the pool of CPU outputs and its statistics."""
