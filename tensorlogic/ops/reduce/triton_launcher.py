"""A launcher of a reduction around the start of its kernels: output, partial results and counters of every call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.candidate import Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.triton_runtime import scratch
from .shapes import Shape


def with_space(
    s: Shape,
    start: Callable[..., bool],
    space: tuple[int, int],
    device: torch.device,
    counted: torch.dtype = torch.int32,
    use: str = "zero",
) -> Launcher:
    """Call `start(x, y, partial, counter)` with what `space` asks for: float32 partial results, and counters of dtype `counted` that
    are kept for `use`; where it says 0, with y."""
    partials, count = space
    empty, counters, stride = register.empty(device), scratch.counters, register.contiguous(s.out)
    dtype = DTYPES[s.dtype]

    def launch(x: torch.Tensor) -> Any:
        y = empty(s.out, stride, dtype)
        partial = empty((partials,), (1,), torch.float32) if partials else y
        counter = counters(device, count, counted, use) if count else y
        return (y,) if start(x, y, partial, counter) else None

    return launch
