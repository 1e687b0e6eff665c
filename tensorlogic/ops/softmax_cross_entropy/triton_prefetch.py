"""softmax_cross_entropy by programs whose rows are on their way before their targets are known."""

from __future__ import annotations

import sys

import torch

from ...core.candidate import Config, Launcher
from ...core.key import Key
from ...kernels import register
from ...kernels.cross_entropy import fused_backward, prefetch, rows
from ...kernels.row_access import shared_memory
from ...kernels.triton_runtime import exact_exp
from . import SOFTMAX_CROSS_ENTROPY, shapes, triton_launcher
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Wide rows of whole groups, reduced, without smoothing."""
    s = shapes.describe(key)
    if isinstance(s, str):
        return s
    reason = prefetch.ahead_refusal(s.columns, s.dtype, s.reduction, s.smoothing, s.align)
    return reason or s


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher: (loss,) or (loss, log-sum-exp, share)."""
    start = prefetch.ahead_launcher(
        s.rows, s.columns, s.dtype, s.reduction, s.ignore_index, dict(config), device, save=s.save
    )
    return triton_launcher.launcher(s, start, device, counted=False)


register.described(
    SOFTMAX_CROSS_ENTROPY,
    "triton.ahead",
    describe,
    lambda s: prefetch.ahead_configs(s.columns, s.dtype),
    build,
    (prefetch, fused_backward, exact_exp, shared_memory, rows, triton_launcher, shapes, sys.modules[__name__]),
)  # fmt: skip
