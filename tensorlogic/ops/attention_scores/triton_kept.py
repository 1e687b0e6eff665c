"""attention_scores on Hopper whose k stays in shared memory, with the last exponentials kept until the sums are there."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import (
    scores_direct,
    scores_kept,
    triton_scores_direct,
    triton_scores_kept,
    triton_scores_specialised,
    wiring,
)
from . import ATTENTION_SCORES, shapes, triton_specialised
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Scores without a mask of tiles that divide T."""
    x = shapes.describe(key)
    if isinstance(x, str):
        return x
    _, _, s, t, d = x.sizes
    if x.mask != "none" or x.causal:
        return "masks are left to the plain kernel"
    return scores_kept.kept_refusal(s, t, d, x.dtype, x.align, (*x.q, *x.k)) or x


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return scores_kept.kept_configs(*x.sizes[3:])


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask); it declines scales that are not positive."""
    start = scores_kept.kept_launcher(x.sizes, x.dtype, x.q, x.k, config, device)
    empty, stride, dtype = wiring.empty(device), wiring.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Any:
        if not 0.0 < scale < triton_specialised.MOST_SCALE:
            return None
        y = empty(x.out, stride, dtype)
        return (y,) if start(q, k, y, scale) else None

    return launch


wiring.described(
    ATTENTION_SCORES,
    "triton.kept",
    describe,
    configs,
    build,
    (
        triton_scores_kept,
        triton_scores_direct,
        triton_scores_specialised,
        scores_kept,
        scores_direct,
        shapes,
        sys.modules[__name__],
    ),
    triton_specialised.available,
)
