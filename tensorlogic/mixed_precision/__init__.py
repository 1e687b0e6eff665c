"""precision(): the fastest number format within an error budget, checked on the caller's data."""
