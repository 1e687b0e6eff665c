"""attention_scores stored straight from the tensor cores' registers, on Hopper: two sweeps over k, nothing staged."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.attention_scores import hopper_register_store
from . import ATTENTION_SCORES, shapes
from .shapes import Shape

MOST_SCALE = 1e6  # beyond it, and from 0 down, the plain kernel is right


def describe(key: Key) -> Shape | str:
    """Scores without a mask of tiles that divide T."""
    x = shapes.describe(key)
    if isinstance(x, str):
        return x
    if x.mask != "none" or x.causal:
        return "masks are left to the plain kernel"
    return hopper_register_store.direct_refusal(*x.sizes[2:], x.dtype, x.align, (*x.q, *x.k)) or x


def available(device: str) -> str | None:
    """None on a Hopper GPU."""
    if device != "cuda":
        return "wgmma needs a CUDA device"
    return register.available(device) or (
        None if register.bulk_copies() else "it is written for Hopper GPUs (sm_90)"
    )


def configs(x: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return hopper_register_store.direct_configs(*x.sizes[2:])


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask)."""
    start = hopper_register_store.direct_launcher(x.sizes, x.dtype, x.q, x.k, config, device)
    empty, stride, dtype = register.empty(device), register.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Any:
        if not 0.0 < scale < MOST_SCALE:
            return None
        y = empty(x.out, stride, dtype)
        return (y,) if start(q, k, y, scale) else None

    return launch


_SOURCES = (hopper_register_store, shapes, sys.modules[__name__])
register.described(ATTENTION_SCORES, "triton.direct", describe, configs, build, _SOURCES, available)
