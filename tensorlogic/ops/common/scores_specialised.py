"""Host side of the warp-specialised attention scores: which they can be, their configurations, their launch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .scores_launch import ROWS, SHARED, Heads, by_tiles

DEPTHS = (32, 64, 128)
_REGISTERS = {2: (80, 112), 4: (96, 120)}  # a thread's at entry, and later of each consumer
_NAMES = ("CONSUMERS", "BLOCK_N", "STAGES", "BUFFERS", "ROUNDS", "APART")
_SHORT = 768  # columns up to which k stays and rounds do not pay


def scores_refusal(s: int, t: int, d: int, dtype: str, align: int) -> str | None:
    """None, or why bulk copies and warpgroups cannot make these scores."""
    if dtype not in ("f16", "bf16") or align < 16:
        return "16-bit floats at 16-byte addresses are required"
    if d not in DEPTHS or s % ROWS or t % ROWS or not s * t:
        return f"D in {DEPTHS}, and S and T in multiples of {ROWS}, are required"
    return None


def specialised_scores_configs(
    heads_: int, s: int, t: int, d: int, cores: int
) -> list[dict[str, Any]]:
    """Configurations worth measuring, best guess first."""
    once = [(2, 64, 8, 2, 1, 0), (4, 64, 6, 2, 1, 0), (4, 128, 8, 1, 1, 0)]
    rounds = sorted((8, 4, 2), key=lambda r: _waves(heads_, s, r, cores) * r)[:2]
    apart = [(4, 128, 6, 1, rounds[0], 1), (4, 128, 4, 1, rounds[1], 1), (4, 64, 4, 2, rounds[0], 1)]  # fmt: skip
    shapes = once if t <= _SHORT else apart + once
    found = [dict(zip(_NAMES, shape, strict=True)) for shape in shapes]
    return [
        c
        for c in found
        if t % c["BLOCK_N"] == 0
        and s > ROWS * c["CONSUMERS"] * (c["ROUNDS"] - 1)
        and d <= ROWS * c["BUFFERS"]
        and _shared(t, d, c) <= SHARED
    ]


def _waves(heads_: int, s: int, rounds: int, cores: int) -> int:
    return math.ceil(heads_ * math.ceil(s / (ROWS * 4 * rounds)) / cores)


def _stages(t: int, d: int, config: Mapping[str, Any]) -> tuple[int, bool]:
    """Stages of the ring, and whether it holds all of a head's k."""
    tiles = t // config["BLOCK_N"]
    if tiles <= config["STAGES"]:
        return tiles, True
    return config["STAGES"], False


def _shared(t: int, d: int, config: Mapping[str, Any]) -> int:
    consumers, block_n = config["CONSUMERS"], config["BLOCK_N"]
    stages, _ = _stages(t, d, config)
    tiles = consumers + config["APART"] * consumers // 2
    return (
        2 * (ROWS * (tiles * d + consumers * config["BUFFERS"] * block_n) + stages * block_n * d)
        + 512
    )


def specialised_scores_launcher(
    shape: tuple[int, int, int, int, int],
    dtype: str,
    q: Heads,
    k: Heads,
    config: Mapping[str, Any],
    device: torch.device,
    cores: int,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool for scale > 0; shape is (B, H, S, T, D), y contiguous [B, H, S, T].

    A neighbour's configuration gives way where it does not divide T or suit D.
    """
    from .triton_scores_specialised import attention_scores_specialised

    t, d = shape[3:]
    if t % config["BLOCK_N"]:
        config = {**config, "BLOCK_N": ROWS}
    if d > ROWS * config["BUFFERS"]:  # a tile of k must fit where outputs wait
        config = {**config, "BUFFERS": d // ROWS}
    consumers = config["CONSUMERS"]
    stages, resident = _stages(t, d, config)
    entry, later = _REGISTERS[consumers]
    together = max(
        1, min(SHARED // _shared(t, d, config), 65536 // (entry * 32 * 4 * (consumers + 1)))
    )
    constexprs = {**config, "RESIDENT": resident, "REGISTERS": later, "STAGES": stages}
    rows = ROWS * consumers * config["ROUNDS"]
    return by_tiles(
        attention_scores_specialised, shape, dtype, q, k, rows, cores * together, constexprs, entry, device
    )  # fmt: skip
