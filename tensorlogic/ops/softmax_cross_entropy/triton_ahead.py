"""softmax_cross_entropy by programs whose rows are on their way before their targets are known."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import (
    triton_cross_entropy,
    triton_cross_entropy_ahead,
    triton_cross_entropy_together,
    wiring,
)
from . import SOFTMAX_CROSS_ENTROPY, shapes
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
    empty, dtype, f32, rows, save = (
        wiring.empty(device),
        DTYPES[s.dtype],
        torch.float32,
        s.rows,
        s.save,
    )

    def launch(x: torch.Tensor, t: torch.Tensor) -> Any:
        loss, y = empty((rows,), (1,), f32), empty((), (), dtype)
        lse = empty((rows,), (1,), f32) if save else loss
        share = empty((1,), (1,), f32) if save else loss
        if not start(x, t, loss, lse, y, share):
            return None
        return (y, lse, share) if save else (y,)

    return launch


wiring.described(
    SOFTMAX_CROSS_ENTROPY,
    "triton.ahead",
    describe,
    lambda s: triton_cross_entropy_ahead.ahead_configs(s.columns, s.dtype),
    build,
    (triton_cross_entropy_ahead, triton_cross_entropy_together, triton_cross_entropy, shapes, sys.modules[__name__]),
)  # fmt: skip
