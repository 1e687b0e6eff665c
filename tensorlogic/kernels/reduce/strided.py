"""Reductions of tensors of any strides: along the dimension whose elements lie next to each other, or across it; deterministic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.reduce.contiguous import EMPTY, finish, fold, merge
from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare
from tensorlogic.system.compile_pool import CompileFailure

Dims = tuple[tuple[int, int], ...]  # (size, stride) of each
FEW = 16  # rows that one tile reads
GATHERED = 4096  # partial results that a program takes at once
# tiles that a program adds up at most, where there is a choice: a chain of sums loses digits
CHAIN = 4096


@triton.jit
def placed(k, K2, K3, stride_k1, stride_k2, stride_k3, DIMS: tl.constexpr):
    """Where the k-th of kept elements begins: [.., K2, K3], of which the last DIMS dimensions are there."""
    if DIMS == 3:
        above = k // K3
        at = (k % K3).to(tl.int64) * stride_k3
        at += (above % K2).to(tl.int64) * stride_k2
        return at + (above // K2).to(tl.int64) * stride_k1
    elif DIMS == 2:
        return (k % K3).to(tl.int64) * stride_k3 + (k // K3).to(tl.int64) * stride_k2
    else:
        return k.to(tl.int64) * stride_k3


@triton.jit
def reduce_along(
    x_ptr, y_ptr, partial_ptr, counter_ptr, K, K2, K3, R1, R2, stride_k1, stride_k2, stride_k3, stride_r1, stride_r2, PARTS, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, DIMS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, LAST: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[k] = reduce over r1, r2 of x[k, r1, r2], r2 being next to each other; BLOCK_K of k and PARTS programs each, float32.

    k counts what is kept, [K1, K2, K3] of any strides. Of every STEP elements along R2 one counts: those between are read
    with it, in accesses of up to 16 bytes. Groups of WIDTH are read whole, what is left of a line apart. With LAST the
    program that comes last combines the parts in fixed order and sets the counter back to 0.
    """
    follow(PDL)
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    k = tile * BLOCK_K + tl.arange(0, BLOCK_K)
    live = k < K
    x_ptrs = x_ptr + placed(k, K2, K3, stride_k1, stride_k2, stride_k3, DIMS)[:, None]
    lane = tl.arange(0, BLOCK_R)
    whole = tl.multiple_of(R2 // WIDTH * WIDTH, WIDTH) if WIDTH > 1 else R2
    tiles = tl.cdiv(whole, BLOCK_R)
    acc = tl.full([BLOCK_K, BLOCK_R], EMPTY, tl.float32)
    for t in range(part, R1 * tiles, PARTS):
        line = t // tiles
        j = (t - line * tiles) * BLOCK_R + lane
        begin = x_ptrs + line.to(tl.int64) * stride_r1
        if stride_r2 == 1:
            ptrs = begin + j[None, :]
        else:
            ptrs = begin + (j.to(tl.int64) * stride_r2)[None, :]
        v = tl.load(ptrs, mask=live[:, None] & (j < whole)[None, :], other=EMPTY).to(tl.float32)
        if STEP > 1:
            v = tl.where((j % STEP == 0)[None, :], v, EMPTY)
        acc = merge(acc, v, KIND)
    total = fold(acc, 1, KIND)
    if TAIL:
        end = tl.arange(0, WIDTH)
        left = live[:, None] & ((end < R2 - whole) & (end % STEP == 0))[None, :]
        rest = tl.full([BLOCK_K, WIDTH], EMPTY, tl.float32)
        for line in range(part, R1, PARTS):
            begin = x_ptrs + (tl.full([], line, tl.int64) * stride_r1 + whole)
            v = tl.load(begin + end[None, :], mask=left, other=EMPTY).to(tl.float32)
            rest = merge(rest, v, KIND)
        total = merge(total, fold(rest, 1, KIND), KIND)
    if LAST:
        at = k.to(tl.int64)
        tl.store(partial_ptr + part.to(tl.int64) * K + at, total, mask=live)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            every = tl.full([BLOCK_P, BLOCK_K], EMPTY, tl.float32)
            for first in range(0, PARTS, BLOCK_P):
                p = first + tl.arange(0, BLOCK_P)
                mask = (p < PARTS)[:, None] & live[None, :]
                ptrs = partial_ptr + (p.to(tl.int64) * K)[:, None] + at[None, :]
                v = tl.load(ptrs, mask=mask, other=EMPTY, cache_modifier=".cg")
                every = merge(every, v, KIND)
            y = finish(fold(every, 0, KIND), COUNT, KIND)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=live)
            tl.store(counter_ptr + tile, 0)
    else:
        y = finish(total, COUNT, KIND)
        tl.store(y_ptr + k, y.to(y_ptr.dtype.element_ty), mask=live)


@triton.jit
def tile_across(
    acc, x_ptr, row, col, R, C, R2, stride_r1, stride_r2, stride_c,
    KIND: tl.constexpr, EMPTY: tl.constexpr, TWO: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """acc with one tile of rows merged into it; WHOLE: all of its columns are there."""
    if TWO:
        at = (row // R2).to(tl.int64) * stride_r1 + (row % R2).to(tl.int64) * stride_r2
    else:
        at = row.to(tl.int64) * stride_r2
    if stride_c == 1:
        ptrs = x_ptr + at[:, None] + col[None, :]
    else:
        ptrs = x_ptr + at[:, None] + (col.to(tl.int64) * stride_c)[None, :]
    mask = (row < R)[:, None]
    if not WHOLE:
        mask = mask & (col < C)[None, :]
    return merge(acc, tl.load(ptrs, mask=mask, other=EMPTY).to(tl.float32), KIND)


@triton.jit
def reduce_across(
    x_ptr, y_ptr, partial_ptr, counter_ptr, O2, C, R, R2, KEPT,
    stride_o1, stride_o2, stride_c, stride_r1, stride_r2, stride_y1, stride_y2, stride_yc, PARTS, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, TWO: tl.constexpr, STEP: tl.constexpr, EDGE: tl.constexpr, LAST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[o1, o2, c] = reduce over r of x[o1, o2, r, c], c being next to each other; PARTS programs a tile of BLOCK_C, float32.

    r counts the R = R1 R2 elements of one dimension or, with TWO, of two. Of every STEP columns one counts: those between are
    read with it. With EDGE, C is uneven, and only the last tile of a line asks which columns are there: accesses of the
    others stay up to 16 bytes wide. LAST as in `reduce_along`.
    """
    follow(PDL)
    tiles_c = tl.cdiv(C, BLOCK_C)
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    outer = tile // tiles_c
    first = (tile - outer * tiles_c) * BLOCK_C
    o1 = (outer // O2).to(tl.int64)
    o2 = (outer % O2).to(tl.int64)
    x_ptr += o1 * stride_o1 + o2 * stride_o2
    col = first + tl.arange(0, BLOCK_C)
    lane = tl.arange(0, BLOCK_R)
    acc = tl.full([BLOCK_R, BLOCK_C], EMPTY, tl.float32)
    if EDGE and first + BLOCK_C <= C:
        for start in range(part * BLOCK_R, R, PARTS * BLOCK_R):
            acc = tile_across(
                acc, x_ptr, start + lane, col, R, C, R2, stride_r1, stride_r2, stride_c, KIND, EMPTY, TWO, True
            )  # fmt: skip
    else:
        for start in range(part * BLOCK_R, R, PARTS * BLOCK_R):
            acc = tile_across(
                acc, x_ptr, start + lane, col, R, C, R2, stride_r1, stride_r2, stride_c, KIND, EMPTY, TWO, False
            )  # fmt: skip
    total = fold(acc, 0, KIND)
    live = (col < C) & (col % STEP == 0)
    at = o1 * stride_y1 + o2 * stride_y2 + (col // STEP).to(tl.int64) * stride_yc
    if LAST:
        tl.store(partial_ptr + part.to(tl.int64) * KEPT + at, total, mask=live)
        tl.debug_barrier()
        if tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == PARTS - 1:
            every = tl.full([BLOCK_P, BLOCK_C], EMPTY, tl.float32)
            for begin in range(0, PARTS, BLOCK_P):
                p = begin + tl.arange(0, BLOCK_P)
                mask = (p < PARTS)[:, None] & live[None, :]
                ptrs = partial_ptr + (p.to(tl.int64) * KEPT)[:, None] + at[None, :]
                v = tl.load(ptrs, mask=mask, other=EMPTY, cache_modifier=".cg")
                every = merge(every, v, KIND)
            y = finish(fold(every, 0, KIND), COUNT, KIND)
            tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=live)
            tl.store(counter_ptr + tile, 0)
    else:
        y = finish(total, COUNT, KIND)
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=live)


@dataclass(frozen=True)
class Lay:
    """A strided reduction as its kernel takes it: sizes and strides by their parameters' names, and how wide accesses are."""

    along: bool
    sizes: dict[str, int]
    # elements from one that counts to the next, where those between are read, too
    step: int
    # elements of the widest access that every line begins aligned for; 1 where they do not lie
    # together
    width: int
    kept: int
    reduce: int
    outer: int  # lines along, or groups of columns across
    length: int  # elements of a line
    dims: int  # that are kept


def lay(kept: Dims, reduced: Dims, along: bool, dtype: str, align: int) -> Lay:
    """What `reduce_along` or `reduce_across` makes of dimensions that are kept, in the output's order, and reduced."""
    inside = list((reduced if along else kept) or ((1, 0),))
    fast = min(range(len(inside)), key=lambda d: (not inside[d][1], inside[d][1], d))
    count, stride = inside.pop(fast)
    width = min(16, align) // (4 if dtype == "f32" else 2)
    for _, other in (*inside, *(kept if along else reduced)):
        width = gcd(width, other)
    step = stride if stride in (2, 4) and width >= 2 * stride else 1
    length, stride = ((count - 1) * step + 1, 1) if step > 1 else (count, stride)
    width = width if stride == 1 else 1
    total, every = prod(n for n, _ in kept), prod(n for n, _ in reduced)
    if along:
        lines, apart = inside[0] if inside else (1, 0)
        (k1, s1), (k2, s2), (k3, s3) = [(1, 0)] * (3 - len(kept)) + list(kept)
        del k1
        sizes = {"K": total, "K2": k2, "K3": k3, "R1": lines, "R2": length}
        sizes |= {"stride_k1": s1, "stride_k2": s2, "stride_k3": s3}
        sizes |= {"stride_r1": apart, "stride_r2": stride}
        return Lay(True, sizes, step, width, total, every, lines, length, max(1, len(kept)))
    y = [prod(n for n, _ in kept[d + 1 :]) for d in range(len(kept))]
    yc = y.pop(fast)
    (o1, s1), (o2, s2) = [(1, 0)] * (2 - len(inside)) + inside
    y1, y2 = [0] * (2 - len(y)) + y
    (_, r1), (r2, s_r2) = [(1, 0)] * (2 - len(reduced)) + list(reduced)
    sizes = {"O2": o2, "C": length, "R": every, "R2": r2, "KEPT": total}
    sizes |= {"stride_o1": s1, "stride_o2": s2, "stride_c": stride, "stride_r1": r1}
    sizes |= {"stride_r2": s_r2, "stride_y1": y1, "stride_y2": y2, "stride_yc": yc}
    return Lay(False, sizes, step, width, total, every, o1 * o2, length, len(kept))


def column_tiles(
    outer: int, reduce: int, inner: int, dtype: str, multiprocessors: int = 132
) -> list[dict[str, Any]]:
    """Tiles for [outer, reduce, inner], inner being next to each other, best guess first: parts, BLOCK_R, BLOCK_C, num_warps.

    Few rows are read by one tile, as wide as leaves every multiprocessor programs; else what counts is how many bytes
    are in flight on each: 64 KB.
    """
    wide = 2 if dtype == "f32" else 1
    rows, most = triton.next_power_of_2(reduce), triton.next_power_of_2(inner)

    def tiles(block: int) -> int:
        return outer * -(-inner // max(1, min(block // wide, most)))

    if reduce <= FEW:
        blocks = [b for b in (1024, 512, 256, 128) if tiles(b) >= 4 * multiprocessors]
        widest = blocks[0] if blocks else 64
        shapes = [(widest, 8192, 4), (widest, 8192, 8), (2 * widest, 16384, 8), (widest // 2, 8192, 4), (widest, 8192, 1)]  # fmt: skip
    elif tiles(256) >= 8 * multiprocessors:
        shapes = [(256, 8192, 4), (512, 8192, 4), (128, 8192, 4), (256, 4096, 4), (64, 8192, 4)]
    else:
        shapes = [(64, 8192, 4), (128, 16384, 8), (64, 2048, 4), (256, 2048, 2), (32, 4096, 4), (256, 4096, 4), (128, 4096, 4)]  # fmt: skip
        if 128 < reduce <= 256:
            shapes.insert(1, (64, 16384, 8))  # all rows at once
    found: list[dict[str, Any]] = []
    for block, elements, warps in shapes:
        block_c = max(1, min(block // wide, most))
        block_r = max(1, min(elements // wide // block_c, rows))
        warps = max(1, block_r * block_c * wide // 2048, min(warps, block_r * block_c // 256))
        per = multiprocessors * 16 // warps // tiles(block)
        parts = max(1, min(-(-reduce // block_r), per, GATHERED // block_c, 128))
        tile = {"parts": parts, "BLOCK_R": block_r, "BLOCK_C": block_c, "num_warps": warps}
        short = reduce <= CHAIN * block_r * parts
        if tile not in found and (short or not found):
            found.append(tile)
    return found


def line_tiles(
    kept: int, lines: int, length: int, dtype: str, multiprocessors: int = 132
) -> list[dict[str, Any]]:
    """Tiles for [kept, lines, length], the last two reduced, length being next to each other, best guess first."""
    wide = 2 if dtype == "f32" else 1
    found: list[dict[str, Any]] = []
    spread = triton.next_power_of_2(length) * max(1, kept // multiprocessors) * wide
    shapes = [(4096, 4), (2048, 4), (8192, 8), (16384, 16)]
    for elements, warps in [(spread, 4)] * (spread < 2048) + shapes:
        elements = triton.next_power_of_2(elements + 1) // 2 // wide
        block_r = min(elements, triton.next_power_of_2(length))
        block_k = max(1, min(elements // block_r, triton.next_power_of_2(kept)))
        warps = max(1, min(warps, block_k * block_r // 128))
        steps, tiles = lines * -(-length // block_r), -(-kept // block_k)
        for parts in (max(1, min(steps, multiprocessors * 16 // warps // tiles)), 1):
            tile = {"parts": parts, "BLOCK_K": block_k, "BLOCK_R": block_r, "num_warps": warps}
            if tile not in found and (parts > 1 or steps <= 4 or tiles >= multiprocessors):
                found.append(tile)
    return found[:6]


def strided_configs(form: Lay, dtype: str, multiprocessors: int = 132) -> list[dict[str, Any]]:
    """Configurations of a strided reduction, best guess first."""
    if form.along:
        tiles = line_tiles(form.kept, form.outer, form.length, dtype, multiprocessors)
        return [{"strategy": "along", **tile} for tile in tiles]
    tiles = column_tiles(form.outer, form.reduce, form.length, dtype, multiprocessors)
    return [{"strategy": "across", **tile} for tile in tiles[:7]]


def strided_workspace(form: Lay, config: dict[str, Any]) -> tuple[int, int]:
    """How many float32 partials and how many int32 counters (zero before the first call) a launch needs."""
    parts = config["parts"]
    return (form.kept * parts, _tiles(form, config)) if parts > 1 else (0, 0)


def _tiles(form: Lay, config: dict[str, Any]) -> int:
    if form.along:
        return -(-form.kept // int(config["BLOCK_K"]))
    return form.outer * -(-form.length // int(config["BLOCK_C"]))


def strided_launcher(
    kind: str, dtype: str, out_dtype: str, form: Lay, config: dict[str, Any], device: torch.device, align: int = 16
) -> Callable[..., bool]:  # fmt: skip
    """A callable (x, y, partial, counter) -> bool for `kind` in "sum", "mean", "max", "min"; y is contiguous.

    partial and counter as `strided_workspace` says (any tensors where it says 0); counters are left at 0. Raises
    CompileFailure for a configuration of the other kernel.
    """
    strategy = "along" if form.along else "across"
    if config["strategy"] != strategy:
        raise CompileFailure(f"a configuration {config['strategy']!r}; {strategy!r} is required")
    parts, last = int(config["parts"]), config["parts"] > 1
    sizes = {**form.sizes, "PARTS": parts, "COUNT": form.reduce}
    names = ("BLOCK_K", "BLOCK_R") if form.along else ("BLOCK_R", "BLOCK_C")
    blocks: dict[str, Any] = {name: config[name] for name in names}
    block = blocks["BLOCK_K" if form.along else "BLOCK_C"]
    constexprs: dict[str, Any] = {"KIND": kind, "EMPTY": EMPTY[kind]}
    uneven = form.width > 1 and form.length % form.width > 0
    if form.along:
        apart = uneven and form.length > form.width
        constexprs |= {
            "DIMS": form.dims,
            "STEP": form.step,
            "WIDTH": form.width if apart else 1,
            "TAIL": apart,
        }
    else:
        constexprs |= {"TWO": form.sizes["R2"] < form.reduce, "STEP": form.step, "EDGE": uneven}
    constexprs |= {"LAST": last, **blocks}
    constexprs["BLOCK_P"] = min(triton.next_power_of_2(parts), max(1, GATHERED // block))
    return prepare(
        reduce_along if form.along else reduce_across,
        grid=(_tiles(form, config) * parts, 1, 1),
        pointers={"x_ptr": dtype, "y_ptr": out_dtype, "partial_ptr": "f32", "counter_ptr": "i32"},
        integers=sizes, constexprs=constexprs, num_warps=config["num_warps"],
        device=device, align=align,
    )  # fmt: skip
