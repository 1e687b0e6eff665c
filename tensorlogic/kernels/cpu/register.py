"""How a native CPU kernel becomes a candidate, and what one may expect of it before anything was measured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ...core.candidate import Candidate, Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...core.op import Op
from ...measure import interference, timer
from ...native import cpu_library, library_files
from ...plans.machine_notes import Notes
from .. import register
from . import output_stores

CACHE_BYTES = 2 << 20  # beyond it, a pass over memory costs what memory gives
# from here on, glibc hands out untouched pages, and touching them costs more than the arithmetic
FRESH_BYTES = 1 << 20


CALL_US = {True: 0.7, False: 2.1}  # of a native kernel with one output, compiled or not


# half of what our autograd node takes beyond PyTorch's, forward and backward (8.4 us, Xeon,
# 2026-11-22)
RECORDED_US = 4.2


def call_us(key: Key | None = None) -> float:
    """What a call of a native kernel costs besides its work; of a key that is recorded, this too, less what its backward may gain."""
    recorded = key is not None and key.direction == "forward"
    return _call_us() + RECORDED_US * recorded


@lru_cache
def _call_us() -> float:
    return CALL_US[cpu_library.calls_available() is None]


def narrow() -> bool:
    """True where our kernels have vectors of eight or four: no masks, so that short rows cost several times as much."""
    return cpu_library.isa() in ("portable", "avx2")


def cpu_only(device: str) -> str | None:
    """None where the native library serves, else why not."""
    return cpu_library.available(device)


def add(
    op: Op,
    id: str,
    build: Callable[[Key], Launcher],
    supports: Callable[[Key], str | None],
    guess: Callable[[Key], float],
    module: str,
    clock: interference.InterferenceProbe | None = None,
) -> None:
    """Register a candidate that calls the native library; the library's own hash is part of its source."""
    _add(op, id, lambda key, config, device: build(key), supports, guess, module, clock)


def add_stored(
    op: Op,
    id: str,
    build: Callable[[Key, int], Launcher],
    supports: Callable[[Key], str | None],
    guess: Callable[[Key], float],
    module: str,
    output: Callable[[Key], int],
    asks: bool = False,
) -> None:
    """As `add`, of a kernel that can store its `output`, of so many bytes, in more than one way, and ask for inputs ahead or not
    (`asks`); `build` takes the number of one."""

    def bind(key: Key, config: Config, device: torch.device) -> Launcher:
        return build(key, output_stores.code(config, output(key)))

    _add(
        op,
        id,
        bind,
        supports,
        guess,
        module,
        configs=lambda key: output_stores.configs(output(key), asks),
        then=output_stores.read,
    )


def _add(
    op: Op,
    id: str,
    bind: Callable[[Key, Config, torch.device], Launcher],
    supports: Callable[[Key], str | None],
    guess: Callable[[Key], float],
    module: str,
    clock: interference.InterferenceProbe | None = None,
    **about: Any,
) -> None:
    op.add(
        Candidate(
            id,
            bind=bind,
            supports=supports,
            available=cpu_only,
            sources=(sys.modules[module], LIBRARY),
            guess=guess,
            trusted=True,
            vouched=True,
            clock=clock,
            **about,
        )
    )


def _product() -> timer.Call | None:
    """A product by tiles, where the processor has them: neighbours on the same core may use its one tile unit, too."""
    if cpu_library.isa() != "amx":
        return None
    a, matmul = torch.full((256, 256), 0.5, device="cpu"), cpu_library.op("matmul")
    return lambda: matmul(a, a)


PRODUCTS = interference.InterferenceProbe(_product, Notes(".clock"))


class Library:
    """Stands for the built library among a candidate's sources: its representation is the builder's stamp."""

    def __repr__(self) -> str:
        stamp = library_files.library().with_name("stamp")
        return stamp.read_text().strip() if stamp.is_file() else "no library"


LIBRARY = Library()


def contiguous(key: Key, *names: str) -> str | None:
    """None when the named tensors are contiguous, non-empty, of one kernel dtype."""
    for name in names:
        t = key.spec(name)
        if t is not None and (0 in t.shape or not register.is_contiguous(t)):
            return f"{name} is empty or not contiguous"
    return register.one_dtype(key, *names)


def size_of(key: Key, name: str) -> int:
    """Elements of a named tensor."""
    t = key.spec(name)
    return 0 if t is None else prod(t.shape)


def bytes_of(key: Key, name: str) -> int:
    """Bytes of a named tensor."""
    t = key.spec(name)
    return 0 if t is None else prod(t.shape) * DTYPES[t.dtype].itemsize


def dtype_of(key: Key, name: str) -> str:
    """Dtype name of a named tensor that is present."""
    t: Any = key.spec(name)
    return str(t.dtype)
