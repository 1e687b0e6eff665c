"""From a public call to a bound launcher: fast path, key, selector, autograd."""
