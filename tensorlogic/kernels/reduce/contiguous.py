"""Reductions of contiguous [outer, reduce, inner]: everything, the last dim, leading dims; deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def larger(a, b):
    """Maximum that keeps NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smaller(a, b):
    """Minimum that keeps NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def fold(v, axis: tl.constexpr, KIND: tl.constexpr):
    """Reduce one axis of a register tile, as a tree."""
    if KIND == "max":
        return tl.reduce(v, axis, larger)
    elif KIND == "min":
        return tl.reduce(v, axis, smaller)
    else:
        return tl.sum(v, axis)


@triton.jit
def merge(acc, v, KIND: tl.constexpr):
    """Combine two register tiles element by element."""
    if KIND == "max":
        return larger(acc, v)
    elif KIND == "min":
        return smaller(acc, v)
    else:
        return acc + v


@triton.jit
def finish(total, COUNT, KIND: tl.constexpr):
    """The reduced value: a mean divides by COUNT."""
    if KIND == "mean":
        return total / (COUNT * 1.0)
    else:
        return total


@triton.jit
def reduce_split(
    x_ptr, y_ptr, partial_ptr, counter_ptr, N, PARTS, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[r] = reduce x[r, :N] with PARTS programs a row, accumulated in BLOCK float32 lanes, then as a tree.

    Each program leaves one partial result; with LAST the program that arrives last combines a row's partials in
    fixed order, writes y and sets the row's counter back to 0: one launch, same bits every run, safe to capture
    and replay. Without LAST, PARTS == 1 writes y and any other PARTS leaves the partials for a second launch.
    """
    follow(PDL)
    row = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    lane = tl.arange(0, BLOCK)
    x_ptr += row.to(tl.int64) * N
    tiles = N // BLOCK
    acc = tl.full([BLOCK], EMPTY, tl.float32)
    for tile in range(part, tiles, PARTS):
        v = tl.load(x_ptr + tile * tl.full([], BLOCK, tl.int64) + lane).to(tl.float32)
        acc = merge(acc, v, KIND)
    if part == tiles % PARTS:
        at = tiles * tl.full([], BLOCK, tl.int64) + lane
        acc = merge(acc, tl.load(x_ptr + at, mask=at < N, other=EMPTY).to(tl.float32), KIND)
    total = fold(acc, 0, KIND)
    if LAST:
        tl.store(partial_ptr + tl.program_id(0), total)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel") == PARTS - 1:
            p = tl.arange(0, BLOCK_P)
            every = tl.load(
                partial_ptr + row * PARTS + p, mask=p < PARTS, other=EMPTY, cache_modifier=".cg"
            )
            value = finish(fold(every, 0, KIND), COUNT, KIND)
            tl.store(y_ptr + row, value.to(y_ptr.dtype.element_ty))
            tl.store(counter_ptr + row, 0)
    else:
        if BLOCK_P == 1:
            total = finish(total, COUNT, KIND)
        tl.store(y_ptr + tl.program_id(0), total.to(y_ptr.dtype.element_ty))


@triton.jit
def reduce_polled(
    x_ptr, y_ptr, cell_ptr, N, PARTS, COUNT, KIND: tl.constexpr, EMPTY: tl.constexpr, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = reduce x[:N] by PARTS programs, each leaving its float32 result and the number of the launch in one 64-bit cell.

    The last program waits until every cell bears this launch's number, combines them in fixed order and counts the
    launch in cell 0; launches of any PARTS may follow one another on the same cells. What a reader needs arrives in one word, so there is no fence and no atomic: for an input
    that is read in a microsecond these would cost half as much again. All other programs start before the last
    one and wait for nobody, so it never waits in vain.
    """
    follow(PDL)
    part = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    launch = tl.load(cell_ptr) + 1
    tiles = tl.cdiv(N, BLOCK)
    acc = tl.full([BLOCK], EMPTY, tl.float32)
    for tile in range(part, tiles, PARTS):
        at = tile * BLOCK + lane
        acc = merge(acc, tl.load(x_ptr + at, mask=at < N, other=EMPTY).to(tl.float32), KIND)
    bits = fold(acc, 0, KIND).to(tl.uint32, bitcast=True).to(tl.int64)
    if part < PARTS - 1:
        tl.store(cell_ptr + 1 + part, (launch << 32) | bits)
    else:
        p = tl.arange(0, BLOCK_P)
        others = p < PARTS - 1
        cells = tl.load(cell_ptr + 1 + p, mask=others, other=0, volatile=True)
        while tl.max((others & ((cells >> 32) != launch)).to(tl.int32), 0) > 0:
            cells = tl.load(cell_ptr + 1 + p, mask=others, other=0, volatile=True)
        found = (cells & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        mine = bits.to(tl.uint32).to(tl.float32, bitcast=True)
        every = tl.where(others, found, tl.where(p == PARTS - 1, mine, EMPTY))
        value = finish(fold(every, 0, KIND), COUNT, KIND)
        tl.store(y_ptr, value.to(y_ptr.dtype.element_ty))
        tl.store(cell_ptr, launch)


@triton.jit
def reduce_rows(
    x_ptr, y_ptr, R, N, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[r] = reduce x[r, :N], BLOCK_R rows a program, float32 lanes then a tree: for many rows, or short ones."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    live = row < R
    x_ptr += row[:, None] * N
    whole = N // BLOCK_C * BLOCK_C
    acc = tl.full([BLOCK_R, BLOCK_C], EMPTY, tl.float32)
    for start in range(0, whole, BLOCK_C):
        v = tl.load(x_ptr + start + col[None, :], mask=live[:, None], other=EMPTY).to(tl.float32)
        acc = merge(acc, v, KIND)
    if whole < N:
        mask = live[:, None] & (whole + col < N)[None, :]
        v = tl.load(x_ptr + whole + col[None, :], mask=mask, other=EMPTY).to(tl.float32)
        acc = merge(acc, v, KIND)
    y = finish(fold(acc, 1, KIND), COUNT, KIND)
    tl.store(y_ptr + row, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def reduce_columns(
    x_ptr, w_ptr, y_ptr, partial_ptr, counter_ptr, R, C, PARTS, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, HAS_W: tl.constexpr, LAST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[o, c] = reduce over r of x[o, r, c] (times w[o, r, c]), PARTS programs a column tile; float32.

    Reads whole row segments, so leading dims reduce at the memory's speed. LAST as in `reduce_split`, with one
    counter per column tile; the partials are [outer, PARTS, C].
    """
    follow(PDL)
    tiles_c = tl.cdiv(C, BLOCK_C)
    part = (tl.program_id(0) % PARTS).to(tl.int64)
    tile = tl.program_id(0) // PARTS
    outer = (tile // tiles_c).to(tl.int64)
    col = (tile % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < C
    lane = tl.arange(0, BLOCK_R).to(tl.int64)
    acc = tl.full([BLOCK_R, BLOCK_C], EMPTY, tl.float32)
    for start in range(part * BLOCK_R, R, PARTS * BLOCK_R):
        row = start + lane
        mask = (row < R)[:, None] & live[None, :]
        at = ((outer * R + row) * C)[:, None] + col[None, :]
        v = tl.load(x_ptr + at, mask=mask, other=EMPTY).to(tl.float32)
        if HAS_W:
            v *= tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32)
        acc = merge(acc, v, KIND)
    total = fold(acc, 0, KIND)
    if LAST:
        tl.store(partial_ptr + (outer * PARTS + part) * C + col, total, mask=live)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            p = tl.arange(0, BLOCK_P).to(tl.int64)
            mask = (p < PARTS)[:, None] & live[None, :]
            at = ((outer * PARTS + p) * C)[:, None] + col[None, :]
            every = tl.load(partial_ptr + at, mask=mask, other=EMPTY, cache_modifier=".cg")
            value = finish(fold(every, 0, KIND), COUNT, KIND)
            tl.store(y_ptr + outer * C + col, value.to(y_ptr.dtype.element_ty), mask=live)
            tl.store(counter_ptr + tile, 0)
    else:
        if BLOCK_P == 1:
            total = finish(total, COUNT, KIND)
        tl.store(
            y_ptr + (outer * PARTS + part) * C + col, total.to(y_ptr.dtype.element_ty), mask=live
        )


# BLOCK_C, 16-bit elements of a tile, programs a multiprocessor, warps: what a sweep over eight shapes found best somewhere
_COLUMNS = (
    (32, 4096, 8, 4),
    (32, 2048, 4, 4),
    (64, 2048, 4, 4),
    (32, 4096, 2, 8),
    (32, 1024, 8, 4),
    (128, 4096, 4, 4),
)
# 16-bit elements of a tile, warps: likewise, over eight shapes of rows (H100)
_ROWS = ((4096, 4), (2048, 2), (4096, 2), (2048, 4))
_LONG_ROWS = ((4096, 4), (2048, 8), (4096, 8), (8192, 8))
ROW = 2048  # 16-bit elements from which on a row is long
# elements of all parts of a column tile, which one program adds up
PARTIALS = 8192
# elements up to which one wave of programs that wait for each other is worth it
POLLED = 2**23
EMPTY = {"sum": 0.0, "mean": 0.0, "max": float("-inf"), "min": float("inf")}


def reduce_configs(
    outer: int, reduce: int, inner: int, dtype: str, multiprocessors: int = 132
) -> list[dict[str, Any]]:
    """Configurations for [outer, reduce, inner], best guess first.

    `last` combines partial results in the launch itself, otherwise a second launch does.
    """
    wide = 2 if dtype == "f32" else 1
    configs: list[dict[str, Any]] = []

    def add(strategy: str, parts: int, last: bool, warps: int, **blocks: int) -> None:
        config = {"strategy": strategy, "parts": parts, "last": last and parts > 1, **blocks}
        config["num_warps"] = warps
        if config not in configs:
            configs.append(config)

    if inner == 1:
        order = ((8192, 8, 1), (4096, 4, 8), (8192, 16, 1), (4096, 8, 2))
        if reduce * outer > 2**22:  # bytes in flight on every SM count for more than the finish
            order = ((4096, 4, 8), (8192, 8, 4), (8192, 16, 2), (8192, 8, 1))
        for block, warps, per in order:
            block //= wide
            parts = max(1, min(-(-reduce // block), multiprocessors * per // outer))
            for last in (True, False) if per != 2 else (True,):
                if parts > 1 or outer == 1:
                    add("split", parts, last, warps, BLOCK=block)
        if outer > 1:
            split, configs = configs, []
            row = triton.next_power_of_2(reduce)
            for elements, warps in _ROWS if row * wide < ROW else _LONG_ROWS:
                block_c = min(elements // wide, row)
                add("rows", 1, False, warps, BLOCK_R=elements // wide // block_c, BLOCK_C=block_c)
            configs = configs + split if outer >= multiprocessors else split + configs
        if outer == 1 and 2**14 <= reduce <= POLLED:
            polled = [
                {
                    "strategy": "polled",
                    "parts": min(parts, -(-reduce // (block // wide))),
                    "last": True,
                    "BLOCK": block // wide,
                    "num_warps": warps,
                }
                for block, warps, parts in (
                    (8192, 8, 128),
                    (4096, 8, 256),
                    (8192, 16, 128),
                    (16384, 16, 64),
                )
            ]
            configs = polled + configs[:5]
        return configs[:9]
    for block_c, elements, per, warps in _COLUMNS:
        block_c = min(block_c, triton.next_power_of_2(inner))
        block_r = min(elements // wide // block_c, triton.next_power_of_2(reduce))
        tiles = outer * -(-inner // block_c)
        most = PARTIALS // block_c
        parts = max(1, min(-(-reduce // block_r), multiprocessors * per // tiles, most))
        for last in (True, False):
            add("columns", parts, last, warps, BLOCK_R=block_r, BLOCK_C=block_c)
    return configs[:10]


def reduce_workspace(
    outer: int, reduce: int, inner: int, config: dict[str, Any]
) -> tuple[int, int]:
    """How many float32 partials and how many counters (zero before the first call) a launch needs.

    Counters are int32; those of "polled" are int64, count its launches, and are shared with nothing else.
    """
    parts = config["parts"]
    if config["strategy"] == "polled":
        return 0, parts + 1
    if parts == 1:
        return 0, 0
    tiles = outer * -(-inner // config["BLOCK_C"]) if config["strategy"] == "columns" else outer
    return outer * parts * inner, tiles if config["last"] else 0


def reduce_launcher(
    kind: str,
    dtype: str,
    out_dtype: str,
    outer: int,
    reduce: int,
    inner: int,
    config: dict[str, Any],
    device: torch.device,
    align: int = 16,
    product: bool = False,
) -> Callable[..., bool]:
    """A callable (x, y, partial, counter) -> bool for `kind` in "sum", "mean", "max", "min".

    x is contiguous [outer, reduce, inner], y [outer, inner]; partial and counter as `reduce_workspace` says (any
    tensors where it says 0). Counters are left at 0. With `product` (columns only) the callable is
    (x, w, y, partial, counter) and reduces x * w.
    """
    columns = config["strategy"] == "columns"
    parts, warps = config["parts"], config["num_warps"]
    last = config["last"] and parts > 1
    blocks = {name: value for name, value in config.items() if name.startswith("BLOCK")}
    count = {"COUNT": reduce}

    def one(x: str, y: str, length: int, pieces: int, **more: Any) -> Callable[..., bool]:
        names = {"x_ptr": x}
        constexprs = {"KIND": kind, "EMPTY": EMPTY[kind], **more}
        if columns:
            names |= {"w_ptr": x, "y_ptr": y, "partial_ptr": "f32", "counter_ptr": "i32"}
            grid = outer * triton.cdiv(inner, constexprs["BLOCK_C"]) * pieces
            kernel, sizes = reduce_columns, {"R": length, "C": inner, "PARTS": pieces, **count}
        elif config["strategy"] == "polled":
            names |= {"y_ptr": y, "cell_ptr": "i64"}
            grid = pieces
            kernel, sizes = reduce_polled, {"N": length, "PARTS": pieces, **count}
        elif config["strategy"] == "rows" or more.get("BLOCK_R"):
            names |= {"y_ptr": y}
            grid = triton.cdiv(outer, constexprs["BLOCK_R"])
            kernel, sizes = reduce_rows, {"R": outer, "N": length, **count}
        else:
            names |= {"y_ptr": y, "partial_ptr": "f32", "counter_ptr": "i32"}
            grid = outer * pieces
            kernel, sizes = reduce_split, {"N": length, "PARTS": pieces, **count}
        ordered = {name: constexprs[name] for name in kernel.arg_names if name in constexprs}
        return prepare(
            kernel, grid=(grid, 1, 1), pointers=names, integers=sizes, constexprs=ordered,
            num_warps=warps, device=device, align=align,
        )  # fmt: skip

    block_p = triton.next_power_of_2(parts)
    if config["strategy"] == "polled":
        alone = one(dtype, out_dtype, reduce, parts, BLOCK_P=block_p, **blocks)
        return lambda x, y, partial, counter: alone(x, y, counter)
    if config["strategy"] == "rows":
        start = one(dtype, out_dtype, reduce, 1, **blocks)
        return lambda x, y, partial, counter: start(x, y)
    if columns:
        first = one(
            dtype, out_dtype if last or parts == 1 else "f32", reduce, parts,
            HAS_W=product, LAST=last, BLOCK_P=block_p, **blocks,
        )  # fmt: skip
        if last or parts == 1:
            if product:
                return first
            return lambda x, y, partial, counter: first(x, x, y, partial, counter)
        rows = min(block_p, 16)
        second = one(
            "f32", out_dtype, parts, 1,
            HAS_W=False, LAST=False, BLOCK_P=1, BLOCK_R=rows, BLOCK_C=blocks["BLOCK_C"],
        )  # fmt: skip
        if product:
            return lambda x, w, y, partial, counter: (
                first(x, w, partial, partial, counter)
                and second(partial, partial, y, partial, counter)
            )
        return lambda x, y, partial, counter: (
            first(x, x, partial, partial, counter) and second(partial, partial, y, partial, counter)
        )
    first = one(
        dtype,
        out_dtype if last or parts == 1 else "f32",
        reduce,
        parts,
        LAST=last,
        BLOCK_P=block_p,
        **blocks,
    )
    if last or parts == 1:
        return first
    second = one("f32", out_dtype, parts, 1, BLOCK_R=1, BLOCK_C=min(block_p, 4096))
    return lambda x, y, partial, counter: first(x, partial, partial, counter) and second(partial, y)
