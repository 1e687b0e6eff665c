"""Reductions by Triton of rows that begin at odd places: in whole aligned groups of 16 bytes, and the ends apart."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ..common import triton_groups, triton_reduce, triton_reduce_groups, triton_rows, wiring
from . import FAMILY, shapes
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Rows of contiguous memory that are no multiple of 16 bytes, of a tensor that begins at one, and as many as there are programs for."""
    found = shapes.describe_any(key)
    if isinstance(found, str):
        return found
    if found.view is not None or found.inner != 1:
        return "no rows of contiguous memory"
    if found.outer < wiring.cores():
        return "fewer rows than multiprocessors"
    return triton_groups.refusal(found.reduce, found.dtype, found.align) or found


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_reduce_groups.groups_configs(s.reduce, s.dtype)


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher."""
    start = triton_reduce_groups.groups_launcher(
        s.kind, s.dtype, s.outer, s.reduce, dict(config), device
    )
    empty, stride, dtype = wiring.empty(device), wiring.contiguous(s.out), DTYPES[s.dtype]

    def launch(x: torch.Tensor) -> Any:
        y = empty(s.out, stride, dtype)
        return (y,) if start(x, y) else None

    return launch


_SOURCES = (triton_reduce_groups, triton_groups, triton_reduce, triton_rows, shapes, sys.modules[__name__])  # fmt: skip
for _op in FAMILY:
    wiring.described(_op, "triton.groups", describe, configs, build, _SOURCES)
