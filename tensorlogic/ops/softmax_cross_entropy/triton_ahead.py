"""softmax_cross_entropy by programs whose rows are on their way before their targets are known."""

from __future__ import annotations

import sys

import torch

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ..common import (
    triton_cross_entropy,
    triton_cross_entropy_ahead,
    triton_cross_entropy_together,
    wiring,
)
from . import SOFTMAX_CROSS_ENTROPY, reduced, shapes
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Wide rows of whole groups, reduced, without smoothing."""
    s = shapes.describe(key)
    if isinstance(s, str):
        return s
    reason = triton_cross_entropy_ahead.ahead_refusal(
        s.columns, s.dtype, s.reduction, s.smoothing, s.align
    )
    return reason or s


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher: (loss,) or (loss, log-sum-exp, share)."""
    start = triton_cross_entropy_ahead.ahead_launcher(
        s.rows, s.columns, s.dtype, s.reduction, s.ignore_index, dict(config), device, save=s.save
    )
    return reduced.launcher(s, start, device, counted=False)


wiring.described(
    SOFTMAX_CROSS_ENTROPY,
    "triton.ahead",
    describe,
    lambda s: triton_cross_entropy_ahead.ahead_configs(s.columns, s.dtype),
    build,
    (triton_cross_entropy_ahead, triton_cross_entropy_together, triton_cross_entropy, reduced, shapes, sys.modules[__name__]),
)  # fmt: skip
