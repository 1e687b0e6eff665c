"""Native CPU kernels and oneDNN, their cost model and calibration."""
