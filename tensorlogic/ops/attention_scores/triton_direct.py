"""attention_scores stored straight from the tensor cores' registers, on Hopper: two sweeps over k, nothing staged."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...op import Config
from ...plans import Key
from ..common import scores_direct, scores_launch, triton_scores_direct, triton_scores_specialised
from . import hopper
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Scores without a mask of tiles that divide T."""
    x = hopper.unmasked(key)
    if isinstance(x, str):
        return x
    return scores_direct.direct_refusal(*x.sizes[2:], x.dtype, x.align, (*x.q, *x.k)) or x


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return scores_direct.direct_configs(*x.sizes[2:])


def prepared(x: Shape, config: Config, device: torch.device) -> Callable[..., bool]:
    """The start (q, k, y, scale)."""
    return scores_direct.direct_launcher(x.sizes, x.dtype, x.q, x.k, config, device)


hopper.candidate(
    "triton.direct",
    describe,
    configs,
    prepared,
    (triton_scores_direct, triton_scores_specialised, scores_direct, scores_launch, sys.modules[__name__]),
)  # fmt: skip
