"""Layer, group and batch norm."""
