"""softmax_cross_entropy by Triton: one pass over the logits, the reduction finished by the last block."""

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
from ...kernels.cross_entropy import fused_backward, prefetch, rows
from ...kernels.row_access import shared_memory
from ...kernels.triton_runtime import exact_exp, scratch
from . import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_BACKWARD, shapes
from .shapes import Shape, describe


def launcher(
    s: Shape, start: Callable[..., bool], device: torch.device, *scalars: float, counted: bool = True
) -> Launcher:  # fmt: skip
    """(loss,) or (loss, log-sum-exp, share) by `start(x, t, losses, lse, y, share, counter, *scalars)`; not `counted`: without a counter."""
    empty, counters, dtype, f32 = register.empty(device), scratch.counters, DTYPES[s.dtype], torch.float32  # fmt: skip
    each, count, save = s.reduction == "none", s.rows, s.save
    shape = s.shape[:-1]
    stride = register.contiguous(shape)

    def launch(x: Tensor, t: Tensor) -> Any:
        loss = empty(shape, stride, dtype) if each else empty((count,), (1,), f32)
        y = loss if each else empty((), (), dtype)
        lse = empty((count,), (1,), f32) if save else loss
        share = empty((1,), (1,), f32) if save else loss
        counter = (loss if each else counters(device, 1, torch.int64),) if counted else ()
        if not start(x, t, loss, lse, y, share, *counter, *scalars):
            return None
        return (y, lse, share) if save else (y,)

    return launch


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The forward launcher: (loss,) or (loss, log-sum-exp, share)."""
    start = rows.cross_entropy_launcher(
        s.rows, s.columns, s.dtype, s.dtype, s.reduction, s.ignore_index, dict(config), device,
        smooth=s.smoothing != 0.0, save=s.save, align=s.align,
    )  # fmt: skip
    return launcher(s, start, device, s.smoothing)


def build_backward(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The backward launcher."""
    start = rows.cross_entropy_backward_launcher(
        s.rows, s.columns, s.dtype, s.dy_dtype, s.reduction, s.ignore_index, dict(config), device,
        smooth=s.smoothing != 0.0, align=s.align,
    )  # fmt: skip
    empty, dtype, stride = register.empty(device), DTYPES[s.dtype], register.contiguous(s.shape)
    smoothing = s.smoothing

    def launch(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, share: Tensor) -> Any:
        dx = empty(s.shape, stride, dtype)
        return (dx,) if start(logits, target, lse, dloss, share, dx, smoothing) else None

    return launch


def describe_prefetched(key: Key) -> Shape | str:
    """Wide rows of whole groups, reduced, without smoothing."""
    s = describe(key)
    if isinstance(s, str):
        return s
    return prefetch.ahead_refusal(s.columns, s.dtype, s.reduction, s.smoothing, s.align) or s


def build_prefetched(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The same by programs whose rows are on their way before their targets are known."""
    start = prefetch.ahead_launcher(
        s.rows, s.columns, s.dtype, s.reduction, s.ignore_index, dict(config), device, save=s.save
    )
    return launcher(s, start, device, counted=False)


_SOURCES = (rows, shapes, sys.modules[__name__])
register.described(
    SOFTMAX_CROSS_ENTROPY, "triton.rows", describe,
    lambda s: rows.cross_entropy_configs(s.columns, s.dtype), build, _SOURCES,
)  # fmt: skip
register.described(
    SOFTMAX_CROSS_ENTROPY_BACKWARD, "triton.rows", describe,
    lambda s: rows.cross_entropy_backward_configs(s.columns, s.dtype), build_backward, _SOURCES,
)  # fmt: skip
register.described(
    SOFTMAX_CROSS_ENTROPY, "triton.ahead", describe_prefetched, lambda s: prefetch.ahead_configs(s.columns, s.dtype),
    build_prefetched, (prefetch, fused_backward, exact_exp, shared_memory, *_SOURCES),
)  # fmt: skip
