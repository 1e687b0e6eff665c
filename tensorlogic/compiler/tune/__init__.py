"""Which implementation serves each region of a graph, measured and remembered."""
