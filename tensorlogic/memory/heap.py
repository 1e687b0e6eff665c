"""Memory that C's heap keeps after measuring: given back to the system where the C library can."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def _trim() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`; None elsewhere."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return None


def give_back() -> None:
    """Return what is free to the system; tensors that were compared in float64 leave hundreds of MiB behind."""
    trim = _trim()
    if trim is not None:
        trim(0)
