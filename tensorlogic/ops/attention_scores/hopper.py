"""What the candidates of attention_scores for Hopper GPUs do alike: what they serve, the launcher, their registration."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import wiring
from . import ATTENTION_SCORES, shapes
from .shapes import Shape

MOST_SCALE = 1e6  # beyond it, and from 0 down, the plain kernel is right


def unmasked(key: Key) -> Shape | str:
    """Scores without a mask, or why not."""
    x = shapes.describe(key)
    if not isinstance(x, str) and (x.mask != "none" or x.causal):
        return "masks are left to the plain kernel"
    return x


def available(device: str) -> str | None:
    """None on a Hopper GPU."""
    if device != "cuda":
        return "bulk copies need a CUDA device"
    return wiring.available(device) or (
        None if wiring.bulk_copies() else "it is written for Hopper GPUs (sm_90)"
    )


def candidate(
    id: str,
    describe: Callable[[Key], Shape | str],
    configs: Callable[[Shape], list[dict[str, Any]]],
    prepared: Callable[[Shape, Config, torch.device], Callable[..., bool]],
    sources: tuple[Any, ...],
) -> None:
    """Register `id`; `prepared(shape, config, device)` is its start (q, k, y, scale) -> bool for positive scales."""

    def build(x: Shape, config: Config, device: torch.device) -> Launcher:
        start = prepared(x, config, device)
        empty, stride, dtype = wiring.empty(device), wiring.contiguous(x.out), DTYPES[x.dtype]

        def launch(
            q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None
        ) -> Any:
            if not 0.0 < scale < MOST_SCALE:
                return None
            y = empty(x.out, stride, dtype)
            return (y,) if start(q, k, y, scale) else None

        return launch

    own = (*sources, shapes, sys.modules[__name__])
    wiring.described(ATTENTION_SCORES, id, describe, configs, build, own, available)
