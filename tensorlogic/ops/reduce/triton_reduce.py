"""Reductions by Triton: [outer, reduce, inner] in one launch (the last block finishes in fixed order) or in two."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ..common import triton_reduce, wiring
from ..common.triton_fitting import fitting
from . import FAMILY, shapes
from .shapes import Shape, describe


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_reduce.reduce_configs(s.outer, s.reduce, s.inner, s.dtype, wiring.cores())


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    kind = config["strategy"]
    lies = kind == "columns" or (s.inner == 1 and (kind != "polled" or s.outer == 1))
    fitting(lies, s.kind, config, f"[{s.outer}, {s.reduce}, {s.inner}]")
    start = triton_reduce.reduce_launcher(
        s.kind, s.dtype, s.dtype, s.outer, s.reduce, s.inner, dict(config), device, s.align
    )
    partials, count = triton_reduce.reduce_workspace(s.outer, s.reduce, s.inner, dict(config))
    counted, use = (
        (torch.int64, "launches") if config["strategy"] == "polled" else (torch.int32, "zero")
    )
    empty, counters, stride, dtype = (
        wiring.empty(device),
        wiring.counters,
        wiring.contiguous(s.out),
        DTYPES[s.dtype],
    )

    def launch(x: torch.Tensor) -> Any:
        y = empty(s.out, stride, dtype)
        partial = empty((partials,), (1,), torch.float32) if partials else y
        counter = counters(device, count, counted, use) if count else y
        return (y,) if start(x, y, partial, counter) else None

    return launch


for _op in FAMILY:
    wiring.described(
        _op,
        "triton.blocks",
        describe,
        configs,
        build,
        (triton_reduce, shapes, sys.modules[__name__]),
    )
