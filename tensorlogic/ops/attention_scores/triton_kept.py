"""attention_scores on Hopper whose k stays in shared memory, with the last exponentials kept until the sums are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...op import Config
from ...plans import Key
from ..common import (
    scores_direct,
    scores_kept,
    scores_launch,
    triton_scores_direct,
    triton_scores_kept,
    triton_scores_specialised,
)
from . import hopper
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Scores without a mask of tiles that divide T."""
    x = hopper.unmasked(key)
    if isinstance(x, str):
        return x
    return scores_kept.kept_refusal(*x.sizes[2:], x.dtype, x.align, (*x.q, *x.k)) or x


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return scores_kept.kept_configs(*x.sizes[3:])


def prepared(x: Shape, config: Config, device: torch.device) -> Callable[..., bool]:
    """The start (q, k, y, scale)."""
    return scores_kept.kept_launcher(x.sizes, x.dtype, x.q, x.k, config, device)


hopper.candidate(
    "triton.kept",
    describe,
    configs,
    prepared,
    (
        triton_scores_kept,
        triton_scores_direct,
        triton_scores_specialised,
        scores_kept,
        scores_direct,
        scores_launch,
        sys.modules[__name__],
    ),
)
