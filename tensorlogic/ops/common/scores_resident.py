"""Host side of the attention scores whose k stays in shared memory: which they can be, their configurations, their launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .scores_specialised import ROWS, Heads, scores_refusal

BLOCK_N = 64
_SHARED = 227 * 1024
_REGISTERS = {2: (80, 112), 4: (96, 120)}  # a thread's at entry, and later of each consumer


def resident_refusal(s: int, t: int, d: int, dtype: str, align: int) -> str | None:
    """None, or why k cannot stay in shared memory."""
    if t % (2 * BLOCK_N) or not resident_configs(t, d):
        return f"pairs of tiles (T in multiples of {2 * BLOCK_N}) that shared memory holds are required, not {t} with D of {d}"
    return scores_refusal(s, t, d, dtype, align)


def resident_configs(t: int, d: int) -> list[dict[str, Any]]:
    """Configurations, best guess first: warpgroups of a program, tiles of outputs on their way from each."""
    found = [{"CONSUMERS": c, "BUFFERS": n} for c, n in ((2, 2), (4, 4), (4, 2))]
    return [c for c in found if _shared(t, d, c) <= _SHARED]


def _shared(t: int, d: int, config: Mapping[str, Any]) -> int:
    consumers = config["CONSUMERS"]
    return 2 * (consumers * ROWS * (d + config["BUFFERS"] * BLOCK_N) + t * d) + 512


def resident_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    q: Heads,
    k: Heads,
    config: Mapping[str, Any],
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool for scale > 0; shape is (B, H, S, T, D), y contiguous [B, H, S, T].

    A neighbour's configuration gives way where it does not fit.
    """
    from .triton_descriptors import Tiled
    from .triton_launch import prepare
    from .triton_scores_resident import attention_scores_resident

    b, h, s, t, d = shape
    fitting = resident_configs(t, d)
    config = config if dict(config) in fitting else fitting[0]
    consumers = config["CONSUMERS"]
    entry, later = _REGISTERS[consumers]
    groups = math.ceil(s / (ROWS * consumers))
    steps = {
        f"{name}{which}_{part}": value
        for name, matrix in (("q", q), ("k", k))
        for which, pair in (("b", matrix.batch), ("h", matrix.head))
        for part, value in zip(("row", "column"), pair, strict=True)
    }
    return prepare(
        attention_scores_resident,
        grid=(b * h * groups, 1, 1),
        tiled={
            "q_desc": Tiled(dtype, q.shape, q.line, (ROWS, d)),
            "k_desc": Tiled(dtype, k.shape, k.line, (BLOCK_N, d)),
            "y_desc": Tiled(dtype, (b * h * s, t), t, (ROWS, BLOCK_N)),
        },
        pointers={},
        integers={**steps, "H": h, "S": s, "groups": groups},
        floats=("scale",),
        constexprs={
            "CONSUMERS": consumers, "REGISTERS": later, "TILES": t // BLOCK_N, "BUFFERS": config["BUFFERS"], "BLOCK_N": BLOCK_N,
        },
        num_warps=4,
        num_stages=1,
        device=device,
        registers=entry,
    )  # fmt: skip
