"""Products of numbers split into halves, widened or checked on the device."""
