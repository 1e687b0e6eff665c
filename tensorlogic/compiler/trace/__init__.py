"""From a model to a graph of ATen calls, and what is known of both."""
