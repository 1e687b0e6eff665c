"""Host side of the attention scores that keep their last exponentials: which they can be, their configurations, their launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .scores_direct import BLOCK_N, direct_refusal, registers
from .scores_launch import SHARED, by_rows

WARPS = 8
_STEP = 2 * BLOCK_N


def kept_refusal(
    s: int, t: int, d: int, dtype: str, align: int, strides: Sequence[int]
) -> str | None:
    """None, or why these scores cannot be made; `strides` are those of q and k over batch, head and row."""
    reason = direct_refusal(s, t, d, dtype, align, strides)
    if reason is None and (s < 16 * WARPS or t <= 2 * _STEP or not kept_configs(t, d)):
        reason = f"S from {16 * WARPS}, T above {2 * _STEP}, and k of a head in half of the shared memory are required"
    return reason


def kept_configs(t: int, d: int) -> list[dict[str, Any]]:
    """Configurations, best guess first: whether a quarter of the exponentials is left to multiply-adds."""
    fits = 2 * d * (t + 16 * WARPS) * (2 if d <= 64 else 1) <= SHARED
    return [{"CUBIC": True}, {"CUBIC": False}] if fits else []


def kept_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    strides_q: Sequence[int],
    strides_k: Sequence[int],
    config: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool for scale > 0; shape is (B, H, S, T, D), y contiguous [B, H, S, T]; strides are
    those of batch, head and row."""
    from .triton_scores_kept import attention_scores_kept

    t, d = shape[3:]
    constexprs = {"N": BLOCK_N, "STEPS": t // _STEP, "CUBIC": config["CUBIC"]}
    return by_rows(
        attention_scores_kept, shape, dtype, strides_q, strides_k, constexprs, WARPS, registers(d), device
    )  # fmt: skip
