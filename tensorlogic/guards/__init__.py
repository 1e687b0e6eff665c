"""What must still hold for something cached to serve a call: tensors, models, global state."""
