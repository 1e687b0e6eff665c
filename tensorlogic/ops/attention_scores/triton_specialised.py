"""attention_scores on Hopper's bulk copies: k streamed past warpgroups, every score written once from shared memory."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key
from ..common import scores_specialised, triton_scores_specialised, wiring
from . import ATTENTION_SCORES, shapes
from .shapes import Shape

MOST_SCALE = 1e6  # beyond it, and from 0 down, the plain kernel is right


def describe(key: Key) -> Shape | str:
    """Scores without a mask whose heads lie in one matrix."""
    x = shapes.describe(key)
    if isinstance(x, str):
        return x
    b, h, s, t, d = x.sizes
    if x.mask != "none" or x.causal:
        return "masks are left to the plain kernel"
    if b * h * s >= 2**31:
        return "more rows than a bulk copy can name"
    reason = scores_specialised.scores_refusal(s, t, d, x.dtype, x.align)
    found = [_heads(x, which) for which in (0, 1)]
    return reason or next((f for f in found if isinstance(f, str)), x)


def _heads(x: Shape, which: int) -> scores_specialised.Heads | str:
    b, h, s, t, d = x.sizes
    return scores_specialised.heads(b, h, (s, t)[which], d, (x.q, x.k)[which])


def available(device: str) -> str | None:
    """None on a Hopper GPU."""
    if device != "cuda":
        return "bulk copies need a CUDA device"
    return wiring.available(device) or (
        None if wiring.bulk_copies() else "it is written for Hopper GPUs (sm_90)"
    )


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    b, h, s, t, d = x.sizes
    return scores_specialised.specialised_scores_configs(b * h, s, t, d, wiring.cores())


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask); it declines scales that are not positive."""
    q, k = _heads(x, 0), _heads(x, 1)
    assert not isinstance(q, str)
    assert not isinstance(k, str)
    start = scores_specialised.specialised_scores_launcher(
        x.sizes, x.dtype, q, k, config, device, wiring.cores()
    )
    empty, stride, dtype = wiring.empty(device), wiring.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Any:
        if not 0.0 < scale < MOST_SCALE:
            return None
        y = empty(x.out, stride, dtype)
        return (y,) if start(q, k, y, scale) else None

    return launch


wiring.described(
    ATTENTION_SCORES,
    "triton.specialised",
    describe,
    configs,
    build,
    (triton_scores_specialised, scores_specialised, shapes, sys.modules[__name__]),
    available,
)
