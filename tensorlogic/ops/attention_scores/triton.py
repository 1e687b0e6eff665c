"""attention_scores by Triton: scores of a block of rows held or computed twice, written once."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.attention_scores import recompute
from . import ATTENTION_SCORES, shapes
from .shapes import Shape, describe


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    _, _, s, t, d = x.sizes
    return recompute.attention_scores_configs(s, t, d, x.dtype, x.mask, x.causal)


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask)."""
    start = recompute.attention_scores_launcher(
        x.sizes, x.dtype, x.dtype, x.q, x.k, x.mask, x.mask_dtype, x.mask_strides, x.causal, dict(config), device, align=x.align,
    )  # fmt: skip
    empty, stride, dtype = register.empty(device), register.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Any:
        y = empty(x.out, stride, dtype)
        return (y,) if start(q, k, q if mask is None else mask, y, scale) else None

    return launch


register.described(
    ATTENTION_SCORES,
    "triton.scores",
    describe,
    configs,
    build,
    (recompute, shapes, sys.modules[__name__]),
)
