"""Reductions by Triton of few, long rows that begin at odd places, or of everything: several programs share a row, in one launch."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ..common import (  # fmt: skip
    triton_groups,
    triton_reduce,
    triton_reduce_shares,
    triton_rows,
    triton_shares,
    wiring,
)
from . import FAMILY, launching, shapes
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Few, long rows of contiguous memory that are no multiple of 16 bytes, of a tensor that begins at one."""
    found = shapes.describe_any(key)
    if isinstance(found, str):
        return found
    if found.view is not None or found.inner != 1:
        return "no rows of contiguous memory"
    refused = triton_groups.refusal(found.reduce, found.dtype, found.align)
    refused = refused or triton_shares.refusal(
        found.outer, found.reduce, found.align, wiring.cores()
    )
    if refused or configs(found):
        return refused or found
    return "shares would be longer than sums are exact"


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_reduce_shares.shares_configs(s.outer, s.reduce, s.dtype, wiring.cores())


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher with its workspace."""
    start = triton_reduce_shares.shares_launcher(
        s.kind, s.dtype, s.outer, s.reduce, dict(config), device
    )
    space = triton_reduce_shares.shares_workspace(s.outer, s.reduce, dict(config))
    return launching.with_space(s, start, space, device)


_SOURCES = (triton_reduce_shares, triton_shares, triton_groups, triton_reduce, triton_rows, shapes, sys.modules[__name__])  # fmt: skip
for _op in FAMILY:
    wiring.described(_op, "triton.shares", describe, configs, build, _SOURCES)
