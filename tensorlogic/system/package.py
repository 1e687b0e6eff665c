"""Where this library lies, and its version."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1]  # `tensorlogic/`


def version() -> str:
    """Of the installed distribution, or of the checkout."""
    try:
        return importlib.metadata.version("tensorlogic-engine")
    except importlib.metadata.PackageNotFoundError:  # run from a checkout
        found: str = sys.modules["tensorlogic"].__version__
        return found
