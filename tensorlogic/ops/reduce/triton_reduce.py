"""Reductions by Triton: [outer, reduce, inner] in one launch (the last block finishes in fixed order) or in two."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import triton_reduce, wiring
from . import FAMILY


@dataclass(frozen=True)
class Shape:
    """What is reduced: kind, dtype, [outer, reduce, inner], and the output's shape."""

    kind: str
    dtype: str
    outer: int
    reduce: int
    inner: int
    out: tuple[int, ...]
    align: int


def describe(key: Key) -> Shape | str:
    """The reduction behind a key: contiguous data, neighbouring dimensions."""
    (x,) = key.tensors
    assert x is not None
    dims, keep = key.flag("dim"), key.flag("keepdim")
    reason = wiring.one_dtype(key)
    if reason is not None:
        return reason
    if not dims or 0 in x.shape:
        return "nothing to reduce"
    if dims != tuple(range(dims[0], dims[-1] + 1)):
        return "the dimensions are not neighbours"
    if not wiring.is_contiguous(x):
        return "not contiguous"
    first, last = dims[0], dims[-1] + 1
    ones = (1,) * len(dims) if keep else ()
    out = (*x.shape[:first], *ones, *x.shape[last:])
    return Shape(
        key.op,
        x.dtype,
        prod(x.shape[:first]),
        prod(x.shape[first:last]),
        prod(x.shape[last:]),
        out,
        wiring.weakest(key),
    )


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_reduce.reduce_configs(s.outer, s.reduce, s.inner, s.dtype, wiring.cores())


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    start = triton_reduce.reduce_launcher(
        s.kind, s.dtype, s.dtype, s.outer, s.reduce, s.inner, dict(config), device, s.align
    )
    partials, count = triton_reduce.reduce_workspace(s.outer, s.reduce, s.inner, dict(config))
    kind, use = (
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
        counter = counters(device, count, kind, use) if count else y
        return (y,) if start(x, y, partial, counter) else None

    return launch


for _op in FAMILY:
    wiring.described(
        _op, "triton.blocks", describe, configs, build, (triton_reduce, sys.modules[__name__])
    )
