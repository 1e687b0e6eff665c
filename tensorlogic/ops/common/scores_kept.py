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
    """Configurations, best guess first: how many of four exponentials of every second tile are left to multiply-adds, and steps whose
    exponentials are held in shared memory."""
    rows = 16 * WARPS
    room = SHARED // (2 if d <= 64 else 1) - 2 * d * (t + rows)
    if room < 0:
        return []
    most = min(2 if d > 64 else 1, room // (2 * rows * _STEP), t // _STEP - 2)
    pairs = dict.fromkeys([(1, most), (2, most), (2, 0)])
    return [{"CUBIC": cubic, "HELD": held} for cubic, held in pairs]


def kept_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    strides_q: Sequence[int],
    strides_k: Sequence[int],
    config: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool for scale > 0; shape is (B, H, S, T, D), y contiguous [B, H, S, T]; strides are
    those of batch, head and row. A neighbour's configuration gives way where it does not fit."""
    from .triton_scores_kept import attention_scores_kept

    t, d = shape[3:]
    fitting = kept_configs(t, d)
    config = config if dict(config) in fitting else fitting[0]
    constexprs = {"N": BLOCK_N, "STEPS": t // _STEP, **config}
    return by_rows(
        attention_scores_kept, shape, dtype, strides_q, strides_k, constexprs, WARPS, registers(d), device
    )  # fmt: skip
