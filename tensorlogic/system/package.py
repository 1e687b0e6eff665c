"""Where this library lies, and its version."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1]  # `tensorlogic/`


def installed(distribution: str) -> str | None:
    """The version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def version() -> str:
    """Of the installed distribution, or of the checkout."""
    return installed("tensorlogic-engine") or str(sys.modules["tensorlogic"].__version__)
