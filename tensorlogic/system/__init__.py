"""The process and its machine: settings, files, workers, hardware."""
