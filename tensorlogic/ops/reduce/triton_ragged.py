"""Reductions by Triton of rows that begin at odd places: in whole aligned groups of 16 bytes, and the ends apart."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.reduce import contiguous, ragged
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import ragged as ragged_rows
from ...kernels.softmax import rows
from ...kernels.triton_runtime import device_math
from . import FAMILY, shapes
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Rows of contiguous memory that are no multiple of 16 bytes, of a tensor that begins at one, and as many as there are programs for."""
    found = shapes.describe_any(key)
    if isinstance(found, str):
        return found
    if found.view is not None or found.inner != 1:
        return "no rows of contiguous memory"
    if found.outer < register.cores():
        return "fewer rows than multiprocessors"
    return ragged_rows.refusal(found.reduce, found.dtype, found.align) or found


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return ragged.groups_configs(s.reduce, s.dtype)


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher."""
    start = ragged.groups_launcher(s.kind, s.dtype, s.outer, s.reduce, dict(config), device)
    empty, stride, dtype = register.empty(device), register.contiguous(s.out), DTYPES[s.dtype]

    def launch(x: torch.Tensor) -> Any:
        y = empty(s.out, stride, dtype)
        return (y,) if start(x, y) else None

    return launch


_SOURCES = (ragged, ragged_rows, contiguous, rows, contiguous_rows, device_math, shapes, sys.modules[__name__])  # fmt: skip
for _op in FAMILY:
    register.described(_op, "triton.groups", describe, configs, build, _SOURCES)
