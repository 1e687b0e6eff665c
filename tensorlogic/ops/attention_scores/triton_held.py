"""attention_scores of short rows on Hopper's bulk copies: every score made once, held until its row's sum is known, written once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...op import Config
from ...plans import Key
from ..common import (
    scores_held,
    scores_launch,
    scores_specialised,
    triton_scores_held,
    triton_scores_specialised,
    wiring,
)
from . import hopper, triton_specialised
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """What the specialised candidate serves, with rows that can be held."""
    x = triton_specialised.describe(key)
    if isinstance(x, str):
        return x
    return scores_held.held_refusal(*x.sizes[2:], x.dtype, x.align) or x


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return scores_held.held_configs(*x.sizes[3:])


def prepared(x: Shape, config: Config, device: torch.device) -> Callable[..., bool]:
    """The start (q, k, y, scale)."""
    q, k = triton_specialised.both(x)
    return scores_held.held_launcher(x.sizes, x.dtype, q, k, config, device, wiring.cores())


hopper.candidate(
    "triton.held",
    describe,
    configs,
    prepared,
    (
        triton_scores_held,
        triton_scores_specialised,
        scores_held,
        scores_specialised,
        scores_launch,
        triton_specialised,
        sys.modules[__name__],
    ),
)
