"""softmax_cross_entropy by programs that stay on their multiprocessor and take row after row."""

from __future__ import annotations

import sys

import torch

from ...op import Config, Launcher
from ...plans import Key
from ..common import triton_cross_entropy, triton_cross_entropy_stays, triton_rows, wiring
from . import SOFTMAX_CROSS_ENTROPY, reduced, shapes
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Wide rows of whole groups, reduced, without smoothing."""
    s = shapes.describe(key)
    if isinstance(s, str):
        return s
    reason = triton_cross_entropy_stays.stays_refusal(
        s.columns, s.dtype, s.reduction, s.smoothing, s.align
    )
    return reason or s


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher: (loss,) or (loss, log-sum-exp, share)."""
    start = triton_cross_entropy_stays.stays_launcher(
        s.rows, s.columns, s.dtype, s.reduction, s.ignore_index, dict(config), device, wiring.cores(), save=s.save
    )  # fmt: skip
    return reduced.launcher(s, start, device)


wiring.described(
    SOFTMAX_CROSS_ENTROPY,
    "triton.stays",
    describe,
    lambda s: triton_cross_entropy_stays.stays_configs(s.columns, s.dtype),
    build,
    (
        triton_cross_entropy_stays,
        triton_cross_entropy,
        triton_rows,
        reduced,
        shapes,
        sys.modules[__name__],
    ),
)
