"""Reductions of up to a few million elements to one value by one wave of programs, the last of which waits for the others."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.reduce import contiguous, one_wave
from ...kernels.triton_runtime import scratch
from . import FAMILY, shapes
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """A dense tensor that is reduced to one value, neither tiny nor far beyond the cache."""
    found = shapes.describe_any(key)
    if isinstance(found, str):
        return found
    if found.outer * found.inner != 1:
        return "more than one value is left"
    if found.view is not None:
        return "not dense"
    if not one_wave.spun_configs(found.reduce, found.dtype):
        return f"from {one_wave.LEAST} elements to 32 MB are required"
    return found


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return one_wave.spun_configs(s.reduce, s.dtype)


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its cells."""
    chosen = dict(config)
    if one_wave.spun_parts(s.reduce, chosen) > one_wave.MOST_PARTS:
        chosen = configs(s)[0]  # a smaller neighbour's
    start = one_wave.spun_launcher(s.kind, s.dtype, s.dtype, s.reduce, chosen, device, s.align)
    count = one_wave.spun_parts(s.reduce, chosen)
    empty, counters, stride, dtype = (
        register.empty(device),
        scratch.counters,
        register.contiguous(s.out),
        DTYPES[s.dtype],
    )

    def launch(x: torch.Tensor) -> Any:
        y = empty(s.out, stride, dtype)
        return (y,) if start(x, y, counters(device, count, torch.int64, "spins")) else None

    return launch


for _op in FAMILY:
    register.described(
        _op,
        "triton.spins",
        describe,
        configs,
        build,
        (one_wave, contiguous, shapes, sys.modules[__name__]),
    )
