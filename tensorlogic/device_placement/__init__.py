"""placement("auto"): CPU or GPU by measured times, transfers included."""
