"""softmax_cross_entropy by Triton: one pass over the logits, the reduction finished by the last block."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.cross_entropy import rows
from . import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_BACKWARD, shapes, triton_launcher
from .shapes import Shape, describe


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The forward launcher: (loss,) or (loss, log-sum-exp, share)."""
    start = rows.cross_entropy_launcher(
        s.rows, s.columns, s.dtype, s.dtype, s.reduction, s.ignore_index, dict(config), device,
        smooth=s.smoothing != 0.0, save=s.save, align=s.align,
    )  # fmt: skip
    return triton_launcher.launcher(s, start, device, s.smoothing)


def build_backward(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The backward launcher."""
    start = rows.cross_entropy_backward_launcher(
        s.rows, s.columns, s.dtype, s.dy_dtype, s.reduction, s.ignore_index, dict(config), device,
        smooth=s.smoothing != 0.0, align=s.align,
    )  # fmt: skip
    empty, dtype, stride, smoothing = (
        register.empty(device),
        DTYPES[s.dtype],
        register.contiguous(s.shape),
        s.smoothing,
    )

    def launch(
        dloss: torch.Tensor,
        logits: torch.Tensor,
        target: torch.Tensor,
        lse: torch.Tensor,
        share: torch.Tensor,
    ) -> Any:
        dx = empty(s.shape, stride, dtype)
        return (dx,) if start(logits, target, lse, dloss, share, dx, smoothing) else None

    return launch


_SOURCES = (rows, triton_launcher, shapes, sys.modules[__name__])
register.described(
    SOFTMAX_CROSS_ENTROPY, "triton.rows", describe,
    lambda s: rows.cross_entropy_configs(s.columns, s.dtype), build, _SOURCES,
)  # fmt: skip
register.described(
    SOFTMAX_CROSS_ENTROPY_BACKWARD, "triton.rows", describe,
    lambda s: rows.cross_entropy_backward_configs(s.columns, s.dtype), build_backward, _SOURCES,
)  # fmt: skip
