"""softmax(scale q k^T + mask), written once."""
