"""attention_scores on Hopper, stored straight from the tensor cores' registers; with k resident in shared memory where it fits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.attention_scores import hopper_register_store, hopper_resident_k
from . import ATTENTION_SCORES, shapes
from .shapes import Shape

MOST_SCALE = 1e6  # beyond it, and from 0 down, the plain kernel is right


def available(device: str) -> str | None:
    """None on a Hopper GPU."""
    if device != "cuda":
        return "wgmma needs a CUDA device"
    return register.available(device) or (
        None if register.bulk_copies() else "it is written for Hopper GPUs (sm_90)"
    )


def candidate(
    id: str,
    refusal: Callable[..., str | None],
    configurations: Callable[..., list[dict[str, Any]]],
    launcher: Callable[..., Callable[..., bool]],
    *kernels: Any,
) -> None:
    """Register a kernel: its refusal(S, T, D, dtype, alignment, strides), configurations(S, T, D) and launcher."""

    def describe(key: Key) -> Shape | str:
        x = shapes.describe(key)
        if isinstance(x, str):
            return x
        if x.mask != "none" or x.causal:
            return "masks are left to the plain kernel"
        return refusal(*x.sizes[2:], x.dtype, x.align, (*x.q, *x.k)) or x

    def configs(x: Shape) -> list[dict[str, Any]]:
        return configurations(*x.sizes[2:])

    def build(x: Shape, config: Config, device: torch.device) -> Launcher:
        start = launcher(x.sizes, x.dtype, x.q, x.k, config, device)
        empty, stride, dtype = register.empty(device), register.contiguous(x.out), DTYPES[x.dtype]

        def launch(q: Tensor, k: Tensor, scale: float, mask: Tensor | None) -> Any:
            if not 0.0 < scale < MOST_SCALE:
                return None
            y = empty(x.out, stride, dtype)
            return (y,) if start(q, k, y, scale) else None

        return launch

    sources = (*kernels, shapes, sys.modules[__name__])
    register.described(ATTENTION_SCORES, id, describe, configs, build, sources, available)


candidate(
    "triton.direct",
    hopper_register_store.direct_refusal,
    hopper_register_store.direct_configs,
    hopper_register_store.direct_launcher,
    hopper_register_store,
)
candidate(
    "triton.kept",
    hopper_resident_k.kept_refusal,
    hopper_resident_k.kept_configs,
    hopper_resident_k.kept_launcher,
    hopper_resident_k,
    hopper_register_store,
)
