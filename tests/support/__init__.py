"""What several tests share: stand-ins, samples, comparisons, fixtures."""
