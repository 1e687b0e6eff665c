"""The launcher that Triton's forward kernels of softmax_cross_entropy share: what is allocated, and what is returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...core.candidate import Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.triton_runtime import scratch
from .shapes import Shape


def launcher(
    s: Shape,
    start: Callable[..., bool],
    device: torch.device,
    *scalars: float,
    counted: bool = True,
) -> Launcher:
    """(loss,) or (loss, log-sum-exp, share) by `start(x, t, losses, lse, y, share, counter, *scalars)`; not `counted`: without a counter."""
    empty, counters, dtype, f32 = register.empty(device), scratch.counters, DTYPES[s.dtype], torch.float32  # fmt: skip
    each, rows, save = s.reduction == "none", s.rows, s.save
    shape = s.shape[:-1]
    stride = register.contiguous(shape)

    def launch(x: torch.Tensor, t: torch.Tensor) -> Any:
        loss = empty(shape, stride, dtype) if each else empty((rows,), (1,), f32)
        y = loss if each else empty((), (), dtype)
        lse = empty((rows,), (1,), f32) if save else loss
        share = empty((1,), (1,), f32) if save else loss
        counter = (loss if each else counters(device, 1, torch.int64),) if counted else ()
        if not start(x, t, loss, lse, y, share, *counter, *scalars):
            return None
        return (y, lse, share) if save else (y,)

    return launch
