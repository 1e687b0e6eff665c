"""The version of this library."""

from __future__ import annotations

import importlib.metadata
import sys


def version() -> str:
    """Of the installed distribution, or of the checkout."""
    try:
        return importlib.metadata.version("tensorlogic-engine")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        found: str = sys.modules["tensorlogic"].__version__
        return found
