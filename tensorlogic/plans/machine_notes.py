"""Lines beside a plan store that processes add to: what was found once on a machine and need not be found again."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

import torch

from . import open_stores

LOG = logging.getLogger("tensorlogic")


class Notes:
    """The lines of one kind of file, those of every store that this process has met."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix
        self.known: dict[str, str | None] = {}  # what was noted in this process has a value or None
        self.read: set[Path] = set()

    def look(self, device: torch.device) -> Path:
        """Where this device's lines are; they are `known` afterwards."""
        path = open_stores.current(device).path.with_suffix(self.suffix)
        if path not in self.read:
            self.read.add(path)
            with contextlib.suppress(OSError, UnicodeDecodeError):
                self.known.update(dict.fromkeys(path.read_text().splitlines()))
        return path

    def append(self, path: Path, line: str) -> None:
        """One line at a time, so that processes do not mix theirs; what cannot be written is found again."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(line + "\n")
        except OSError as problem:
            LOG.debug("tensorlogic: %s cannot be written: %s", path, problem)

    def forget(self) -> None:
        """Know nothing that was not said on disk."""
        self.known.clear()
        self.read.clear()
