"""Triton's cache and its assembler as the process found them: workers, this process and the next one agree on every kernel."""

from __future__ import annotations

import os
import threading

from triton.backends.nvidia import compiler

from tensorlogic import settings


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
