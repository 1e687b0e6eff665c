"""Host side of the attention scores that are held: which they can be, their configurations, their launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .scores_specialised import ROWS, Heads, scores_refusal

MOST = 384  # columns: more leave no room for two units of work at a time
_SHARED = 227 * 1024
_REGISTERS = (168, 240)  # a thread's at entry, and later


def held_refusal(s: int, t: int, d: int, dtype: str, align: int) -> str | None:
    """None, or why rows of scores cannot be held."""
    if t > MOST or t < d + ROWS:
        return f"T of {d + ROWS} (D and a tile) to {MOST} is required"
    return scores_refusal(s, t, d, dtype, align)


def _shared(t: int, d: int, config: Mapping[str, Any]) -> int:
    tiles = 2 * ROWS * d + config["STAGES"] * config["BLOCK_N"] * d + 2 * ROWS * t
    return 2 * tiles + 512


def _fits(t: int, d: int, config: Mapping[str, Any]) -> bool:
    """Whole tiles, of k one more than is needed where outputs wait (rows are made again there), and memory for all."""
    tiles, over = divmod(t, config["BLOCK_N"])
    enough = not over and ROWS * (tiles - 1) >= d and config["KEPT"] <= tiles
    return enough and _shared(t, d, config) <= _SHARED


def held_configs(t: int, d: int) -> list[dict[str, Any]]:
    """Configurations, best guess first: columns of a tile, tiles of k on their way, tiles of scores that stay in registers."""
    names = ("BLOCK_N", "STAGES", "KEPT")
    found = []
    for block_n, stages, kept in ((64, 8, 4), (64, 4, 1), (128, 4, 1)):
        config = dict(zip(names, (block_n, stages, min(kept, t // block_n)), strict=True))
        if _fits(t, d, config):
            found.append(config)
    return found


def held_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    q: Heads,
    k: Heads,
    config: Mapping[str, Any],
    device: torch.device,
    cores: int,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool for scale > 0; shape is (B, H, S, T, D), y contiguous [B, H, S, T].

    A neighbour's configuration gives way where it does not fit.
    """
    from .triton_descriptors import Tiled
    from .triton_launch import prepare
    from .triton_scores_held import attention_scores_held

    b, h, s, t, d = shape
    if not _fits(t, d, config):
        config = held_configs(t, d)[0]
    block_n = config["BLOCK_N"]
    entry, later = _REGISTERS
    groups = math.ceil(s / (2 * ROWS))
    units = b * h * groups
    steps = {
        f"{name}{which}_{part}": value
        for name, matrix in (("q", q), ("k", k))
        for which, pair in (("b", matrix.batch), ("h", matrix.head))
        for part, value in zip(("row", "column"), pair, strict=True)
    }
    return prepare(
        attention_scores_held,
        grid=(min(units, cores), 1, 1),
        tiled={
            "q_desc": Tiled(dtype, q.shape, q.line, (ROWS, d)),
            "k_desc": Tiled(dtype, k.shape, k.line, (block_n, d)),
            "y_desc": Tiled(dtype, (b * h * s, t), t, (ROWS, block_n)),
        },
        pointers={},
        integers={**steps, "H": h, "S": s, "T": t, "groups": groups, "units": units},
        floats=("scale",),
        constexprs={
            "CONSUMERS": 2, "REGISTERS": later, "TILES": t // block_n, "KEPT": config["KEPT"], "BLOCK_N": block_n,
            "STAGES": config["STAGES"],
        },
        num_warps=4,
        num_stages=1,
        device=device,
        registers=entry,
    )  # fmt: skip
