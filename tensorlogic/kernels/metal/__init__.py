"""Metal shaders for Apple GPUs."""
