"""Host side that the attention scores for Hopper share: how q and k lie, and the launch by rows or by bulk copies."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Sizes = tuple[int, int, int, int, int]  # B, H, S, T, D
SHARED = 227 * 1024  # bytes that one multiprocessor's programs share
ROWS = 64  # of q that a warpgroup takes at a time


@dataclass(frozen=True)
class Heads:
    """[B, H, rows, D] as one matrix of lines: where in it a batch and a head begin, as (row, column) steps."""

    shape: tuple[int, int]
    line: int
    batch: tuple[int, int]
    head: tuple[int, int]


def heads(b: int, h: int, rows: int, d: int, strides: Sequence[int]) -> Heads | str:
    """`strides` are those of batch, head and row; the last dimension lies together."""
    line = strides[2]
    steps = [_step(n, s, line) for n, s in zip((b, h), strides[:2], strict=True)]
    if line % 8 or line < d or None in steps:
        return "heads do not begin at a row and column of one matrix"
    (batch, head) = (step or (0, 0) for step in steps)
    last = [(b - 1) * i + (h - 1) * j for i, j in zip(batch, head, strict=True)]
    if last[1] + d > line:
        return "rows of several heads overlap"
    return Heads((last[0] + rows, last[1] + d), line, batch, head)


def _step(count: int, stride: int, line: int) -> tuple[int, int] | None:
    if count == 1:
        return (0, 0)
    if stride % line == 0:
        return (stride // line, 0)
    return (0, stride) if stride < line else None


def by_rows(
    kernel: Any,
    sizes: Sizes,
    dtype: str,
    strides_q: Sequence[int],
    strides_k: Sequence[int],
    constexprs: Mapping[str, Any],
    warps: int,
    registers: int,
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool: a program for every 16 `warps` rows of a head; y contiguous [B, H, S, T],
    strides those of batch, head and row."""
    from .triton_launch import prepare

    b, h, s, t, d = sizes
    groups = math.ceil(s / (16 * warps))
    names = ("stride_qb", "stride_qh", "stride_qs", "stride_kb", "stride_kh", "stride_ks")
    return prepare(
        kernel,
        grid=(b * h * groups, 1, 1),
        pointers=dict.fromkeys(("q_ptr", "k_ptr", "y_ptr"), dtype),
        integers={
            **dict(zip(names, (*strides_q, *strides_k), strict=True)),
            "H": h, "S": s, "T": t, "groups": groups,
        },
        floats=("scale",),
        constexprs={"D": d, **constexprs},
        num_warps=warps,
        num_stages=1,
        device=device,
        registers=registers,
    )  # fmt: skip


def by_tiles(
    kernel: Any,
    sizes: Sizes,
    dtype: str,
    q: Heads,
    k: Heads,
    rows: int,
    programs: int,
    constexprs: Mapping[str, Any],
    registers: int,
    device: torch.device,
) -> Callable[..., bool]:
    """A callable (q, k, y, scale) -> bool: at most `programs`, which take units of `rows` rows of a head one after the other;
    y contiguous [B, H, S, T]."""
    from .triton_descriptors import Tiled
    from .triton_launch import prepare

    b, h, s, t, d = sizes
    groups = math.ceil(s / rows)
    units = b * h * groups
    block_n = constexprs["BLOCK_N"]
    steps = {
        f"{name}{which}_{part}": value
        for name, matrix in (("q", q), ("k", k))
        for which, pair in (("b", matrix.batch), ("h", matrix.head))
        for part, value in zip(("row", "column"), pair, strict=True)
    }
    return prepare(
        kernel,
        grid=(min(units, programs), 1, 1),
        tiled={
            "q_desc": Tiled(dtype, q.shape, q.line, (ROWS, d)),
            "k_desc": Tiled(dtype, k.shape, k.line, (block_n, d)),
            "y_desc": Tiled(dtype, (b * h * s, t), t, (ROWS, block_n)),
        },
        pointers={},
        integers={**steps, "H": h, "S": s, "T": t, "groups": groups, "units": units},
        floats=("scale",),
        constexprs=constexprs,
        num_warps=4,
        num_stages=1,
        device=device,
        registers=registers,
    )
