"""Where the native libraries are expected, and whether what lies there is whole and of these sources."""

from __future__ import annotations

import functools
import runpy
import struct
from pathlib import Path

from ..system import settings
from ..system.package import FOLDER

OLDEST_TORCH = (2, 11)  # the stable ABI that the library targets
PACKAGE = FOLDER.resolve()
BUILDER = PACKAGE.parent / "tools" / "build_native.py"


def library() -> Path:
    """Where the library is expected."""
    named = settings.native_library()
    return named if named is not None else PACKAGE / "_native" / "libtensorlogic_native.so"


@functools.cache
def stale() -> frozenset[str]:
    """In a checkout: libraries in it that were built from other sources, and so may lack what is called here."""
    if settings.native_library() is not None or not BUILDER.exists():
        return frozenset()
    return frozenset(runpy.run_path(str(BUILDER))["stale"]())


def rebuilding() -> str:
    return f"run `python {BUILDER.relative_to(PACKAGE.parent)}`"


def is_truncated(path: Path) -> bool:
    """Whether an ELF file ends before its last part, the section headers, does: as an interrupted copy. Loading it would end the process."""
    with path.open("rb") as file:
        head = file.read(64)
    if not head.startswith(b"\x7fELF"):
        return not head
    if len(head) < 64:
        return True
    (begin,), (size, count) = (
        struct.unpack_from("<Q", head, 40),
        struct.unpack_from("<HH", head, 58),
    )
    return path.stat().st_size < begin + size * count
