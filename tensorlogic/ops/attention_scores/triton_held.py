"""attention_scores of short rows on Hopper's bulk copies: every score made once, held until its row's sum is known, written once."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import (
    scores_held,
    scores_specialised,
    triton_scores_held,
    triton_scores_specialised,
    wiring,
)
from . import ATTENTION_SCORES, shapes, triton_specialised
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """What the specialised candidate serves, with rows that can be held."""
    x = triton_specialised.describe(key)
    if isinstance(x, str):
        return x
    _, _, s, t, d = x.sizes
    return scores_held.held_refusal(s, t, d, x.dtype, x.align) or x


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    _, _, _, t, d = x.sizes
    return scores_held.held_configs(t, d)


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask); it declines scales that are not positive."""
    b, h, s, t, d = x.sizes
    first = scores_specialised.heads(b, h, s, d, x.q)
    second = scores_specialised.heads(b, h, t, d, x.k)
    assert not isinstance(first, str)
    assert not isinstance(second, str)
    start = scores_held.held_launcher(
        x.sizes, x.dtype, first, second, config, device, wiring.cores()
    )
    empty, stride, dtype = wiring.empty(device), wiring.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Any:
        if not 0.0 < scale < triton_specialised.MOST_SCALE:
            return None
        y = empty(x.out, stride, dtype)
        return (y,) if start(q, k, y, scale) else None

    return launch


wiring.described(
    ATTENTION_SCORES,
    "triton.held",
    describe,
    configs,
    build,
    (
        triton_scores_held,
        triton_scores_specialised,
        scores_held,
        scores_specialised,
        shapes,
        sys.modules[__name__],
    ),
    triton_specialised.available,
)
