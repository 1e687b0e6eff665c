"""attention_scores on Hopper's bulk copies: k streamed past warpgroups, every score written once from shared memory."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from ...op import Config
from ...plans import Key
from ..common import scores_launch, scores_specialised, triton_scores_specialised, wiring
from . import hopper
from .shapes import Shape


def describe(key: Key) -> Shape | str:
    """Scores without a mask whose heads lie in one matrix."""
    x = hopper.unmasked(key)
    if isinstance(x, str):
        return x
    b, h, s, t, d = x.sizes
    if b * h * s >= 2**31:
        return "more rows than a bulk copy can name"
    reason = scores_specialised.scores_refusal(s, t, d, x.dtype, x.align)
    found = [_heads(x, which) for which in (0, 1)]
    return reason or next((f for f in found if isinstance(f, str)), x)


def _heads(x: Shape, which: int) -> scores_launch.Heads | str:
    b, h, s, t, d = x.sizes
    return scores_launch.heads(b, h, (s, t)[which], d, (x.q, x.k)[which])


def both(x: Shape) -> tuple[scores_launch.Heads, scores_launch.Heads]:
    """q and k of a shape that is served, as bulk copies see them."""
    q, k = _heads(x, 0), _heads(x, 1)
    assert not isinstance(q, str)
    assert not isinstance(k, str)
    return q, k


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    b, h, s, t, d = x.sizes
    return scores_specialised.specialised_scores_configs(b * h, s, t, d, wiring.cores())


def prepared(x: Shape, config: Config, device: torch.device) -> Callable[..., bool]:
    """The start (q, k, y, scale)."""
    return scores_specialised.specialised_scores_launcher(
        x.sizes, x.dtype, *both(x), config, device, wiring.cores()
    )


hopper.candidate(
    "triton.specialised",
    describe,
    configs,
    prepared,
    (triton_scores_specialised, scores_specialised, scores_launch, sys.modules[__name__]),
)
