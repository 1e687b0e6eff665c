"""Memory that C's heap keeps after measuring: given back to the system where the C library can."""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import Any

# What is left at the end of the heap is not worth a call of the system below this many bytes.
SMALL = 1 << 17
DONTNEED = getattr(mmap, "MADV_DONTNEED", None)


class _Counts(ctypes.Structure):
    """glibc's `struct mallinfo2`: nine other counts stand before `keepcost`."""

    _fields_ = (("others", ctypes.c_size_t * 9), ("keepcost", ctypes.c_size_t))


@functools.cache
def _c() -> Any:
    """The C library where it can give memory back, a glibc; None elsewhere."""
    try:
        library = ctypes.CDLL(None)
        library.malloc_trim.argtypes = (ctypes.c_size_t,)
    except (AttributeError, OSError, TypeError):  # musl, macOS, Windows
        return None
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes = (ctypes.c_size_t,)
    library.free.argtypes = (ctypes.c_void_p,)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def _end(library: Any) -> int:
    """Bytes that are free at the end of the heap; 0 where the library does not say (glibc before 2.33)."""
    try:
        library.mallinfo2.restype = _Counts
    except AttributeError:
        return 0
    return library.mallinfo2().keepcost


def give_back() -> None:
    """Return what is free to the system; tensors that were compared in float64 leave hundreds of MiB behind."""
    library = _c()
    if library is None:
        return
    library.malloc_trim(0)
    # glibc keeps the end of its heap where somebody else has moved the program break behind it: its pages go in any case.
    size = _end(library) - SMALL // 2
    block = library.malloc(size) if size > SMALL // 2 and DONTNEED is not None else None
    if block is not None:
        before = -block % mmap.PAGESIZE
        library.madvise(block + before, (size - before) // mmap.PAGESIZE * mmap.PAGESIZE, DONTNEED)
        library.free(block)
