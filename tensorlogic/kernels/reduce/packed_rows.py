"""Reductions over the leading dimension of rows that are short or begin at odd places: several rows are read as one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.reduce.contiguous import EMPTY, finish, fold, merge, reduce_columns
from tensorlogic.kernels.triton_runtime.config_check import fitting
from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def reduce_abreast(
    x_ptr, y_ptr, partial_ptr, counter_ptr, R, C, PARTS, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, ABREAST: tl.constexpr, LAST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[c] = reduce over r of x[r, c], ABREAST rows being one line of BLOCK_W places, by PARTS programs; float32.

    ABREAST is a multiple of what 16 bytes hold, so that every line begins at a 16-byte address and accesses are as wide.
    What a program has of a line is parted into its rows once, at the end. LAST as in `reduce_split`; the partials are [PARTS, C].
    """
    follow(PDL)
    part = tl.program_id(0)
    width, lines = C * ABREAST, R // ABREAST
    col = tl.arange(0, BLOCK_W)
    lane = tl.arange(0, BLOCK_R)
    acc = tl.full([BLOCK_R, BLOCK_W], EMPTY, tl.float32)
    for start in range(part * BLOCK_R, lines, PARTS * BLOCK_R):
        line = start + lane
        ptrs = x_ptr + line.to(tl.int64)[:, None] * width + col[None, :]
        mask = (line < lines)[:, None] & (col < width)[None, :]
        acc = merge(acc, tl.load(ptrs, mask=mask, other=EMPTY).to(tl.float32), KIND)
    total = fold(acc, 0, KIND)
    if part == PARTS - 1:  # rows that make no whole line
        ptrs = x_ptr + lines.to(tl.int64) * width + col
        rest = tl.load(ptrs, mask=col < (R - lines * ABREAST) * C, other=EMPTY)
        total = merge(total, rest.to(tl.float32), KIND)
    row, c = tl.arange(0, BLOCK_A), tl.arange(0, BLOCK_C)
    live = c < C
    there = (row < ABREAST)[:, None] & live[None, :]
    at = tl.where(there, row[:, None] * C + c[None, :], 0)
    apart = tl.gather(total, tl.reshape(at, [BLOCK_A * BLOCK_C]), 0)
    value = fold(tl.where(there, tl.reshape(apart, [BLOCK_A, BLOCK_C]), EMPTY), 0, KIND)
    if LAST:
        tl.store(partial_ptr + part * C + c, value, mask=live)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr, 1, sem="acq_rel") == PARTS - 1:
            every = tl.full([BLOCK_P, BLOCK_C], EMPTY, tl.float32)
            for first in range(0, PARTS, BLOCK_P):
                p = first + tl.arange(0, BLOCK_P)
                mask = (p < PARTS)[:, None] & live[None, :]
                ptrs = partial_ptr + p[:, None] * C + c[None, :]
                v = tl.load(ptrs, mask=mask, other=EMPTY, cache_modifier=".cg")
                every = merge(every, v, KIND)
            y = finish(fold(every, 0, KIND), COUNT, KIND)
            tl.store(y_ptr + c, y.to(y_ptr.dtype.element_ty), mask=live)
            tl.store(counter_ptr, 0)
    else:
        if BLOCK_P == 1:
            value = finish(value, COUNT, KIND)
        tl.store(y_ptr + part * C + c, value.to(y_ptr.dtype.element_ty), mask=live)


# columns up to which tiles of them are short of a power of two by much
NARROW = 128
# places of a line, best guess first: what fourteen shapes on an H100 took
LINES = (2048, 4096, 1024, 8192)
FULL = 0.6  # of them, at least
GATHERED = 8192  # partial results that a program combines at once
# elements that one lane adds up at most: a chain of sums loses digits
CHAIN = 4096
# elements of 2 bytes in a tile, programs a multiprocessor, warps, likewise
TILES = ((16384, 1, 8), (4096, 2, 8), (16384, 2, 16), (8192, 1, 8), (8192, 2, 8), (4096, 1, 4))


def refusal(columns: int, dtype: str, align: int) -> str | None:
    """Why rows are left to kernels that read them one below the other, or None."""
    if align < 16:
        return "a tensor at a 16-byte address is required"
    whole = columns * SIZES[dtype] % 16 == 0
    if columns & (columns - 1) == 0 or (whole and columns > NARROW):
        return "rows fill tiles as they are"
    if not rows_abreast(columns, dtype):
        return f"rows of {columns} are too long to be read side by side"
    return None


def rows_abreast(columns: int, dtype: str) -> list[tuple[int, int]]:
    """How many rows of `columns` make lines of how many places, best guess first, two at most."""
    width = 16 // SIZES[dtype]
    found = [(line // columns // width * width, line) for line in LINES]
    return [(abreast, line) for abreast, line in found if abreast * columns >= FULL * line][:2]


def abreast_configs(
    rows: int, columns: int, dtype: str, multiprocessors: int = 132
) -> list[dict[str, Any]]:
    """Configurations of contiguous [rows, columns], best guess first."""
    found: list[dict[str, Any]] = []
    for n, (abreast, line) in enumerate(rows_abreast(columns, dtype)):
        for elements, per, warps in TILES if n == 0 else TILES[:3]:
            block_r = elements // (SIZES[dtype] // 2) // line
            lines = rows // abreast
            parts = min(-(-lines // max(1, block_r)), multiprocessors * per)
            config = {"ABREAST": abreast, "BLOCK_W": line, "BLOCK_R": block_r, "parts": parts}
            config |= {"last": parts * columns <= GATHERED, "num_warps": warps}
            exact = lines <= CHAIN * block_r * parts
            if block_r and parts > 1 and exact and config not in found:
                found.append(config)
    return found + [{**config, "last": not config["last"]} for config in found[:2]]


def abreast_workspace(columns: int, config: dict[str, Any]) -> tuple[int, int]:
    """How many float32 partial results and int32 counters (zero before the first call) a launch needs."""
    return config["parts"] * columns, int(config["last"])


def abreast_launcher(
    kind: str, dtype: str, rows: int, columns: int, config: dict[str, Any], device: torch.device
) -> Callable[..., bool]:
    """A callable (x, y, partial, counter) -> bool for `kind` in "sum", "mean", "max", "min": contiguous [rows, columns] at a
    16-byte address -> [columns]. partial and counter as `abreast_workspace` says; the counter is left at 0."""
    abreast, parts, last, warps = (
        config[name] for name in ("ABREAST", "parts", "last", "num_warps")
    )
    fits = abreast * columns <= config["BLOCK_W"] and abreast % (16 // SIZES[dtype]) == 0
    exact = rows // abreast <= CHAIN * config["BLOCK_R"] * parts
    fitting(fits and exact, kind, config, f"{rows} rows of {columns}")
    block_c = triton.next_power_of_2(columns)
    block_p = max(1, min(triton.next_power_of_2(parts), GATHERED // block_c)) if parts > 1 else 1
    first = prepare(
        reduce_abreast,
        grid=(parts, 1, 1),
        pointers={"x_ptr": dtype, "y_ptr": dtype if last or parts == 1 else "f32", "partial_ptr": "f32", "counter_ptr": "i32"},
        integers={"R": rows, "C": columns, "PARTS": parts, "COUNT": rows},
        constexprs={
            "KIND": kind, "EMPTY": EMPTY[kind], "ABREAST": abreast, "LAST": last,
            "BLOCK_R": config["BLOCK_R"], "BLOCK_W": config["BLOCK_W"],
            "BLOCK_A": triton.next_power_of_2(abreast), "BLOCK_C": block_c, "BLOCK_P": block_p,
        },
        num_warps=warps, device=device,
    )  # fmt: skip
    if last or parts == 1:
        return first
    narrow = min(32, block_c)
    second = prepare(
        reduce_columns,
        grid=(triton.cdiv(columns, narrow), 1, 1),
        pointers={"x_ptr": "f32", "w_ptr": "f32", "y_ptr": dtype, "partial_ptr": "f32", "counter_ptr": "i32"},
        integers={"R": parts, "C": columns, "PARTS": 1, "COUNT": rows},
        constexprs={
            "KIND": kind, "EMPTY": EMPTY[kind], "HAS_W": False, "LAST": False,
            "BLOCK_R": min(triton.next_power_of_2(parts), 4096 // narrow), "BLOCK_C": narrow, "BLOCK_P": 1,
        },
        num_warps=4, device=device,
    )  # fmt: skip
    return lambda x, y, partial, counter: (
        first(x, partial, partial, counter) and second(partial, partial, y, partial, counter)
    )
