"""Text files that are replaced in one step: who reads them sees the old or the new one, whatever stops the writer."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path

# temporary files of killed processes are swept after this long
LEFTOVER_S = 3600.0


def replace(path: Path, text: str, sync: bool = True) -> None:
    """Make `text` all that `path` holds, in UTF-8; folders that lack are made.

    A link stays one: the file it leads to is replaced. A pipe or a device, such as /dev/null, is written to.

    Args:
        sync: wait until it is on the disk.

    Raises:
        OSError: it cannot be written; a file is then as it was.
    """
    if path.exists() and not path.is_file():  # a folder, which says so, a pipe or a device
        with path.open("w", encoding="utf-8", newline="\n") as stream:
            stream.write(text)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sweep(path: Path) -> None:
    """Remove what killed writers of `path` left behind long ago."""
    for leftover in path.parent.glob(f".{path.name}.*.tmp"):
        try:
            if time.time() - leftover.stat().st_mtime > LEFTOVER_S:
                leftover.unlink()
        except FileNotFoundError:  # its owner was quicker
            continue
