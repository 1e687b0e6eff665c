"""Adapters for third-party kernel packages; each appears when its package is installed, by the entry points third parties use."""
