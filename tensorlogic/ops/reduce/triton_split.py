"""Reductions by Triton of few, long rows that begin at odd places, or of everything: several programs share a row, in one launch."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels import register
from ...kernels.reduce import contiguous, split
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import ragged as ragged_rows
from ...kernels.row_access import split as split_rows
from ...kernels.softmax import rows
from ...kernels.triton_runtime import device_math
from . import FAMILY, shapes, triton_launcher
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Few, long rows of contiguous memory that are no multiple of 16 bytes, of a tensor that begins at one."""
    found = shapes.describe_any(key)
    if isinstance(found, str):
        return found
    if found.view is not None or found.inner != 1:
        return "no rows of contiguous memory"
    refused = ragged_rows.refusal(found.reduce, found.dtype, found.align)
    refused = refused or split_rows.refusal(
        found.outer, found.reduce, found.align, register.cores()
    )
    if refused or configs(found):
        return refused or found
    return "shares would be longer than sums are exact"


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return split.shares_configs(s.outer, s.reduce, s.dtype, register.cores())


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    start = split.shares_launcher(s.kind, s.dtype, s.outer, s.reduce, dict(config), device)
    space = split.shares_workspace(s.outer, s.reduce, dict(config))
    return triton_launcher.with_space(s, start, space, device)


_SOURCES = (split, split_rows, ragged_rows, contiguous, rows, contiguous_rows, device_math, shapes, sys.modules[__name__])  # fmt: skip
for _op in FAMILY:
    register.described(_op, "triton.shares", describe, configs, build, _SOURCES)
