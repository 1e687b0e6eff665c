"""softmax_cross_entropy whose forward pass prepares the gradient for the incoming one it guesses; backward settles it."""

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
from ...kernels.cross_entropy import fused_backward, fused_backward_smem, fused_backward_smem_kernel
from ...kernels.cross_entropy import rows as cross_entropy_rows
from ...kernels.row_access import contiguous as contiguous_rows
from ...kernels.row_access import ragged as ragged_rows
from ...kernels.row_access import shared_memory
from ...kernels.softmax import rows as softmax_rows
from ...kernels.triton_runtime import device_math, exact_exp, launch_plan, scratch
from . import SOFTMAX_CROSS_ENTROPY, shapes
from .joint_backward import TOGETHER
from .shapes import Shape

WORDS = torch.int32


def describe(key: Key) -> Shape | str:
    """Reduced losses of rows that a program holds."""
    s = shapes.describe(key)
    if isinstance(s, str):
        return s
    reason = fused_backward.together_refusal(s.columns, s.dtype, s.reduction, s.smoothing, s.align)
    return reason or (s if configs(s) else f"no program holds a row of {s.columns}")


def configs(s: Shape) -> list[dict[str, Any]]:
    """Configurations, best guess first: long rows in shared memory and registers, on a Hopper GPU; others in registers."""
    found = fused_backward.together_configs(s.columns, s.dtype)
    if register.bulk_copies():
        found = [*fused_backward_smem.held_configs(s.columns, s.dtype), *found]
    return found


def forward(s: Shape, config: Config, device: torch.device) -> Launcher:
    """(logits, target) -> (loss, log-sum-exp and what its rounding took [2 rows], share of a row, prepared gradient, guess)."""
    what = (s.rows, s.columns, s.dtype, s.reduction, s.ignore_index, dict(config), device)
    start = (
        fused_backward_smem.held_launcher(*what, register.cores())
        if "AHEAD" in config
        else fused_backward.together_launcher(*what)
    )
    empty, counters, dtype, f32 = register.empty(device), scratch.counters, DTYPES[s.dtype], torch.float32  # fmt: skip
    rows, shape, stride = s.rows, s.shape, register.contiguous(s.shape)

    def launch(x: Tensor, t: Tensor) -> Any:
        part, lse = empty((rows,), (1,), f32), empty((2 * rows,), (1,), f32)
        y, share = empty((), (), dtype), empty((1,), (1,), f32)
        used, dx = empty((2,), (1,), WORDS), empty(shape, stride, dtype)
        counter = counters(device, 1, torch.int64)
        cell = counters(device, 2, WORDS, scratch.LASTING)
        if not start(x, t, part, lse, y, share, counter, cell, used, dx):
            return None
        return y, lse, share, dx, used

    return launch


def settling(s: Shape, device: torch.device) -> Callable[..., Tensor]:
    """(incoming gradient, logits, target, and what `forward` kept) -> the gradient; a prepared one that is None is made anew."""
    start = fused_backward.settle_launcher(
        s.rows, s.columns, s.dtype, s.dtype, s.ignore_index, device, register.cores()
    )
    dtype, stride = DTYPES[s.dtype], register.contiguous(s.shape)

    def settle(
        dy: Tensor, x: Tensor, t: Tensor, lse: Tensor, share: Tensor, dx: Tensor | None, used: Tensor
    ) -> Tensor:  # fmt: skip
        if dx is None:  # handed out in an earlier backward pass
            out = torch.empty_strided(s.shape, stride, dtype=dtype, device=device)
            used = torch.zeros(2, dtype=WORDS, device=device)
            cell = torch.zeros(2, dtype=WORDS, device=device)
        else:
            out = dx.data  # whoever changes it in place does not change what is kept
            cell = scratch.counters(device, 2, WORDS, scratch.LASTING)
        if start(x, t, lse, dy, share, used, cell, out):
            return out
        if start(x, t, lse, dy.clone(), share, used, cell, out):  # at an aligned address
            return out
        raise RuntimeError(
            f"softmax_cross_entropy: what was kept of logits {s.shape} for backward has been moved to unaligned memory; "
            f"leave it where it was, or compute under tensorlogic.policy(force='triton.rows')"
        )

    return settle


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """Loss and gradient, one after the other."""
    ahead, settle = forward(s, config, device), settling(s, device)

    def launch(dloss: Tensor, logits: Tensor, target: Tensor) -> Any:
        outs = ahead(logits, target)
        return None if outs is None else (outs[0], settle(dloss, logits, target, *outs[1:]))

    return launch


def parts(key: Key, config: Config, device: torch.device) -> tuple[Launcher, Callable[..., Tensor]]:
    """Forward, replayed in C, and what settles its gradient."""
    s = describe(key)
    if isinstance(s, str):
        raise ValueError(f"{key.text} is not served in one pass: {s}")
    ahead = launch_plan.plan(SOFTMAX_CROSS_ENTROPY, key, device, forward(s, config, device))
    return ahead, settling(s, device)


_SOURCES = (
    fused_backward, exact_exp, shared_memory, fused_backward_smem_kernel, fused_backward_smem, cross_entropy_rows,
    ragged_rows, softmax_rows, contiguous_rows, device_math, shapes, sys.modules[__name__],
)  # fmt: skip
register.described(TOGETHER, "triton.together", describe, configs, build, _SOURCES, parts=parts)
