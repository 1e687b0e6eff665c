"""Host side of the attention scores that are stored straight from registers: which they can be, their configurations, their launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .scores_launch import SHARED, by_rows

BLOCK_N = 64  # columns of a product; two of them are a step
DEPTHS = (32, 64, 128)
_FAR = 2**23  # offsets within a step's rows have 32 bits
WARPS = (4, 8)


def direct_refusal(
    s: int, t: int, d: int, dtype: str, align: int, strides: Sequence[int]
) -> str | None:
    """None, or why these scores cannot be made; `strides` are those of q and k over batch, head and row."""
    if dtype not in ("f16", "bf16") or align < 16 or any(n % 8 for n in strides):
        return "16-bit floats in rows at 16-byte addresses are required"
    if max(strides[2::3]) >= _FAR:
        return f"rows less than {_FAR} elements apart are required"
    if d not in DEPTHS or s < 16 * WARPS[0] or t % (2 * BLOCK_N) or not t:
        return (
            f"D in {DEPTHS}, S of {16 * WARPS[0]} and T in multiples of {2 * BLOCK_N} are required"
        )
    return None


def registers(d: int) -> int:
    """A thread's: four programs of 4 warps on a multiprocessor, or two of 8; with D of 128 shared memory leaves room for eight warps."""
    return 224 if d > 64 else 128


def direct_configs(s: int, t: int, d: int) -> list[dict[str, Any]]:
    """Configurations, best guess first: warps, steps of k that shared memory holds (all of them: k stays there)."""
    steps = t // (2 * BLOCK_N)
    pairs = [(4, min(3, steps)), (8, steps), (8, min(3, steps)), (4, steps)]
    found = [{"num_warps": w, "STAGES": stages} for w, stages in dict.fromkeys(pairs)]
    return [
        c
        for c in found
        if s >= 16 * c["num_warps"]
        and _shared(c["STAGES"], d, c["num_warps"]) * (2 if d <= 64 else 1) <= SHARED
    ]


def _shared(stages: int, d: int, warps: int) -> int:
    return 2 * d * (stages * 2 * BLOCK_N + 16 * warps)


def direct_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    strides_q: Sequence[int],
    strides_k: Sequence[int],
    config: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool for scale > 0; shape is (B, H, S, T, D), y contiguous [B, H, S, T]; strides are
    those of batch, head and row. A neighbour's configuration gives way where it does not fit."""
    from .triton_scores_direct import attention_scores_direct

    s, t, d = shape[2:]
    fitting = direct_configs(s, t, d)
    config = config if dict(config) in fitting else fitting[0]
    constexprs = {"N": BLOCK_N, "STEPS": t // (2 * BLOCK_N), "STAGES": config["STAGES"]}
    return by_rows(
        attention_scores_direct, shape, dtype, strides_q, strides_k, constexprs, config["num_warps"], registers(d), device
    )  # fmt: skip
