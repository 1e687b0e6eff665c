"""Triton's cache and its assembler as the process found them: workers, this process and the next one agree on every kernel."""

from __future__ import annotations

import contextlib
import functools
import importlib
import mmap
import os
import sys
import threading
from typing import IO, Any

import torch
from triton.backends.nvidia import compiler

from tensorlogic.system import settings

HANDING_S = 2e-4  # between Python's threads while files are hashed
LARGE = 1 << 24  # bytes of a file that is hashed in one piece
_warming = threading.Lock()


def warm() -> None:
    """What the first compilation of a process begins with, 0.3 s: Triton hashes its own files, and remembers. Who comes meanwhile waits."""
    cache = importlib.import_module("triton.runtime.cache")
    with _warming:
        getattr(cache, "triton_key", int)()  # some versions keep it elsewhere


@functools.cache
def begin() -> None:
    """`warm` in a thread, where kernels will be loaded; returns at once."""
    if torch.cuda.is_available():
        threading.Thread(target=_warmed, name="tensorlogic-hash", daemon=True).start()


def _warmed() -> None:
    """`warm` beside a thread that imports modules, and keeps the interpreter for 5 ms whenever a file's piece has been read or hashed:
    there are a hundred files, one of 460 MB."""
    cache, before = importlib.import_module("triton.runtime.cache"), sys.getswitchinterval()
    sys.setswitchinterval(min(HANDING_S, before))
    cache.open = _opened  # type: ignore[attr-defined]  # what it takes for Python's own
    try:
        with contextlib.suppress(OSError):  # said when needed
            warm()
    finally:
        del cache.open
        sys.setswitchinterval(before)


def _opened(path: Any, mode: str = "r", *more: Any, **named: Any) -> Any:
    """Python's `open`; of a large file the first piece is all of it."""
    file = open(path, mode, *more, **named)  # noqa: SIM115  (closed by who asked for it)
    return _Whole(file) if mode == "rb" and os.fstat(file.fileno()).st_size >= LARGE else file


class _Whole:
    """A file to read once, in one piece that takes no memory and, when it is hashed, no turns with other threads."""

    def __init__(self, file: IO[Any]) -> None:
        with file:
            self.left: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __enter__(self) -> _Whole:
        return self

    def __exit__(self, *problem: object) -> None:
        self.left = b""

    def read(self, size: int = -1) -> mmap.mmap | bytes:
        """What is left, whatever is asked for."""
        piece, self.left = self.left, b""
        return piece


class _Own:
    """Inside, the environment names the folder and the assembler that it named when the process began; torch.compile sets
    both to its own. Threads may be inside together; what was there before comes back when the last has left."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = 0
        self.changed: dict[str, str | None] = {}

    def __enter__(self) -> None:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                found = settings.TRITON
                self.changed = {
                    name: os.environ.get(name)
                    for name, value in found.items()
                    if os.environ.get(name) != value
                }
                _set({name: found[name] for name in self.changed})

    def __exit__(self, *problem: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                _set(self.changed)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if settings.TRITON_PTXAS in variables:
        # the assembler's version is part of a kernel's name in the cache, and remembered
        getattr(getattr(compiler, "get_ptxas_version", None), "cache_clear", int)()


own = _Own()
