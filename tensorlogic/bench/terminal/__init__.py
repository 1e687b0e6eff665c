"""What the benchmark shows while it runs."""
