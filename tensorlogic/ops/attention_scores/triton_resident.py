"""attention_scores of rows whose k fits into shared memory, on Hopper's bulk copies: two sweeps over it, few barriers."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import (
    scores_resident,
    scores_specialised,
    triton_scores_resident,
    triton_scores_specialised,
    wiring,
)
from . import ATTENTION_SCORES, shapes, triton_specialised
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """What the specialised candidate serves, with k that fits."""
    x = triton_specialised.describe(key)
    if isinstance(x, str):
        return x
    _, _, s, t, d = x.sizes
    return scores_resident.resident_refusal(s, t, d, x.dtype, x.align) or x


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    _, _, _, t, d = x.sizes
    return scores_resident.resident_configs(t, d)


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask); it declines scales that are not positive."""
    b, h, s, t, d = x.sizes
    lies = [scores_specialised.heads(b, h, n, d, strides) for n, strides in ((s, x.q), (t, x.k))]
    first, second = (one for one in lies if not isinstance(one, str))
    start = scores_resident.resident_launcher(x.sizes, x.dtype, first, second, config, device)
    empty, stride, dtype = wiring.empty(device), wiring.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Any:
        if not 0.0 < scale < triton_specialised.MOST_SCALE:
            return None
        y = empty(x.out, stride, dtype)
        return (y,) if start(q, k, y, scale) else None

    return launch


wiring.described(
    ATTENTION_SCORES,
    "triton.resident",
    describe,
    configs,
    build,
    (
        triton_scores_resident,
        triton_scores_specialised,
        scores_resident,
        scores_specialised,
        shapes,
        sys.modules[__name__],
    ),
    triton_specialised.available,
    trusted=False,
)
