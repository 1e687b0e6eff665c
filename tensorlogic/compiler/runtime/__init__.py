"""The generated function of a graph, and its streams."""
