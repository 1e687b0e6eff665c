"""Host side of the attention scores that are held: which they can be, their configurations, their launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from .scores_launch import ROWS, SHARED, Heads, by_tiles
from .scores_specialised import scores_refusal

MOST = 384  # columns: more leave no room for two units of work at a time
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
    return enough and _shared(t, d, config) <= SHARED


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
    from .triton_scores_held import attention_scores_held

    t, d = shape[3:]
    if not _fits(t, d, config):
        config = held_configs(t, d)[0]
    entry, later = _REGISTERS
    tiles = t // config["BLOCK_N"]
    constexprs = {**config, "CONSUMERS": 2, "REGISTERS": later, "TILES": tiles}
    return by_tiles(
        attention_scores_held, shape, dtype, q, k, 2 * ROWS, cores, constexprs, entry, device
    )
