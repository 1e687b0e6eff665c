"""Gradients of element-wise ops with operands that are shared by rows or columns: what is whole is written, what is shared is
summed, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.elementwise.column_passes import arrive, backward_configs, gathered, leave
from tensorlogic.kernels.elementwise.elementwise import combine
from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def operand(ptr, row, col, step, mask, rows, cols, MODE: tl.constexpr, UNIT: tl.constexpr, other):
    """Elements of an operand in float32: of a matrix, `step` from one row to the next and UNIT from one column to the next; of what
    all rows or all columns share; or `other` of one that is not read."""
    if MODE == "full":
        along = col if UNIT == 1 else col.to(tl.int64) * UNIT
        v = tl.load(ptr + ((row.to(tl.int64) * step)[:, None] + along[None, :]), mask, other)
    elif MODE == "row":
        v = tl.load(ptr + col, cols, other)[None, :]
    elif MODE == "column":
        v = tl.load(ptr + row, rows, other)[:, None]
    elif MODE == "one":
        v = tl.load(ptr)
    else:
        v = tl.full([1, 1], other, tl.float32)
    return v.to(tl.float32)


@triton.jit
def shared_gradients(
    dy_ptr, a_ptr, b_ptr, y_ptr, da_ptr, db_ptr, dc_ptr, space_ptr, counter_ptr, M, N, PARTS, a_step, b_step,
    OP: tl.constexpr, DY: tl.constexpr, A: tl.constexpr, B: tl.constexpr, Y: tl.constexpr,
    DA: tl.constexpr, DB: tl.constexpr, DC: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr, ALONG: tl.constexpr,
    A_UNIT: tl.constexpr, B_UNIT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradients of `OP` over [M, N] from dy: DA, DB and DC say which are written ("full"), summed ("sum") or nobody's ("none");
    float32, sums too, rounded once. Sums are over rows, or ALONG each row.

    What is read is read once. PARTS programs share a tile of sums (SHARED: more than one); the last to arrive adds theirs in
    fixed order.
    """
    follow(PDL)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    KEPT: tl.constexpr = BLOCK_R if ALONG else BLOCK_C
    STEP: tl.constexpr = BLOCK_C if ALONG else BLOCK_R
    AXIS: tl.constexpr = 1 if ALONG else 0
    kept = tile * KEPT + tl.arange(0, KEPT)
    live = kept < (M if ALONG else N)
    lane = tl.arange(0, STEP)
    kind: tl.constexpr = dy_ptr.dtype.element_ty
    of_a = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    of_b = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    of_c = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    most = N if ALONG else M
    for start in range(part * STEP, most, PARTS * STEP):
        moved = start + lane
        inside = moved < most
        row = kept if ALONG else moved
        col = moved if ALONG else kept
        rows = live if ALONG else inside
        cols = inside if ALONG else live
        mask = rows[:, None] & cols[None, :]
        at = (row.to(tl.int64) * N)[:, None] + col[None, :]
        dy = tl.where(mask, operand(dy_ptr, row, col, N, mask, rows, cols, DY, 1, 0.0), 0.0)
        a = operand(a_ptr, row, col, a_step, mask, rows, cols, A, A_UNIT, 1.0)
        b = operand(b_ptr, row, col, b_step, mask, rows, cols, B, B_UNIT, 1.0)
        if OP == "add_relu":
            y = operand(y_ptr, row, col, N, mask, rows, cols, Y, 1, 0.0)
            g, _ = combine("relu_bwd", kind, dy, y, y)
            h = g
        elif OP == "add":
            g, h = dy, dy
        elif OP == "sub":
            g, h = dy, -dy
        elif OP == "div":
            g, h = combine("div_bwd", kind, dy, a, b)
        elif OP == "mul_relu":
            g, h = combine("mul_relu_bwd", kind, dy, a, b)
        else:  # mul, and affine
            g, h = combine("mul_bwd", kind, dy, a, b)
        if DA == "full":
            tl.store(da_ptr + at, g.to(kind), mask)
        elif DA == "sum":
            of_a += tl.where(mask, g, 0.0)
        if DB == "full":
            tl.store(db_ptr + at, h.to(kind), mask)
        elif DB == "sum":
            of_b += tl.where(mask, h, 0.0)
        if DC == "sum":
            of_c += dy
    B_SLOT: tl.constexpr = 1 if DA == "sum" else 0
    C_SLOT: tl.constexpr = B_SLOT + (1 if DB == "sum" else 0)
    if SHARED:
        if DA == "sum":
            leave(space_ptr, tile, part, PARTS, tl.sum(of_a, AXIS), 0, SLOTS, KEPT)
        if DB == "sum":
            leave(space_ptr, tile, part, PARTS, tl.sum(of_b, AXIS), B_SLOT, SLOTS, KEPT)
        if DC == "sum":
            leave(space_ptr, tile, part, PARTS, tl.sum(of_c, AXIS), C_SLOT, SLOTS, KEPT)
        last = arrive(counter_ptr, tile, PARTS)
        if DA == "sum":
            total = gathered(space_ptr, tile, PARTS, last, 0, SLOTS, KEPT, BLOCK_P)
            tl.store(da_ptr + kept, total.to(kind), mask=live & last)
        if DB == "sum":
            total = gathered(space_ptr, tile, PARTS, last, B_SLOT, SLOTS, KEPT, BLOCK_P)
            tl.store(db_ptr + kept, total.to(kind), mask=live & last)
        if DC == "sum":
            total = gathered(space_ptr, tile, PARTS, last, C_SLOT, SLOTS, KEPT, BLOCK_P)
            tl.store(dc_ptr + kept, total.to(kind), mask=live & last)
    else:
        if DA == "sum":
            tl.store(da_ptr + kept, tl.sum(of_a, AXIS).to(kind), mask=live)
        if DB == "sum":
            tl.store(db_ptr + kept, tl.sum(of_b, AXIS).to(kind), mask=live)
        if DC == "sum":
            tl.store(dc_ptr + kept, tl.sum(of_c, AXIS).to(kind), mask=live)


FEW = 128  # rows that one program may hold
LINE = 8192  # elements of a row that one program may hold
# elements a thread at most: each has an address of its own where rows are of odd length
ACCESSES = 16


def shared_gradient_configs(
    rows: int, columns: int, along: bool, multiprocessors: int
) -> list[dict[str, Any]]:
    """Configurations, best guess first, at most 8: sums over rows, or `along` them. Where one program can hold what is summed, none
    leaves parts for another to add, which takes as long as all else of a small pass."""
    if along:
        found = _columns(rows, columns, multiprocessors)
    elif rows <= FEW:
        wide = columns >= 2 * multiprocessors * 2048 // min(16, triton.next_power_of_2(rows))
        found = _wide(rows, columns) if wide else _few(rows, columns, multiprocessors)
    else:
        found = [*backward_configs(rows, columns, multiprocessors)]
        if rows <= 4 * FEW and columns <= 16 * multiprocessors:
            found = [_alone(256, 16, 8), _alone(128, 16, 8), *found]
    return [c for i, c in enumerate(found) if c not in found[:i]][:8]


def _alone(block_r: int, block_c: int, warps: int) -> dict[str, Any]:
    """A configuration whose programs wait for no other."""
    return {"BLOCK_R": block_r, "BLOCK_C": block_c, "parts": 1, "num_warps": warps}


def _warps(elements: int, each: int, least: int, most: int) -> int:
    """Warps, `least` to `most`, of which a thread has `each` of so many elements."""
    return max(least, min(most, elements // (32 * each)))


def _few(rows: int, columns: int, multiprocessors: int) -> list[dict[str, Any]]:
    """All rows at once, as many columns as leave every multiprocessor a program, but 16 at least."""
    block_r, line = triton.next_power_of_2(rows), max(16, triton.next_power_of_2(columns))
    block_c = max(16, 512 // block_r)
    while 2 * block_c * block_r <= 4096 and columns > 2 * block_c * (multiprocessors - 1):
        block_c *= 2
    c, found = block_c, []
    for wanted, each, least in (
        (c, 8, 4),
        (c, 4, 4),
        (2 * c, 8, 4),
        (c, 16, 1),
        (2 * c, 16, 1),
        (4 * c, 16, 1),
        (c // 2, 8, 4),
    ):
        width = min(max(16, wanted), line)
        warps = _warps(block_r * width, each, least, 8)
        if block_r * width <= 32 * warps * ACCESSES:
            found.append(_alone(block_r, width, warps))
    return found


def _wide(rows: int, columns: int) -> list[dict[str, Any]]:
    """Steps of few rows over whole cache lines: little is asked for beyond the last row, and rows are added within a thread."""
    held = triton.next_power_of_2(rows)
    step = min(16, held)
    found = []
    for block_r, size, warps in (
        (step, 2048, 4),
        (step, 2048, 8),
        (step // 2, 2048, 4),
        (2 * step, 4096, 8),
        (2 * step, 2048, 4),
        (step, 1024, 4),
    ):
        block_r = max(1, min(block_r, held))
        block_c = min(size // block_r, triton.next_power_of_2(columns))
        found.append(_alone(block_r, block_c, warps))
    return found


def _columns(rows: int, columns: int, multiprocessors: int) -> list[dict[str, Any]]:
    """Sums along rows: a program has whole rows where it can hold one, else PARTS of them share it."""
    line, held = max(16, triton.next_power_of_2(columns)), triton.next_power_of_2(rows)
    found = []
    for widest, size, per, warps in (
        (1024, 2048, 4, 4),
        (2048, 2048, 4, 8),
        (512, 1024, 8, 4),
        (2048, 4096, 2, 8),
        (256, 2048, 4, 4),
    ):
        block_c = min(widest, line)
        block_r = min(size // block_c, held)
        tiles = triton.cdiv(rows, block_r)
        parts = max(1, min(triton.cdiv(columns, block_c), multiprocessors * per // tiles, 512))
        found.append({"BLOCK_R": block_r, "BLOCK_C": block_c, "parts": parts, "num_warps": warps})
    if line > LINE:
        return found
    block_r = min(max(1, 512 // line), held)
    own = [
        _alone(block_r, line, _warps(block_r * line, each, least, 16))
        for each, least in ((8, 4), (16, 1))
    ]
    if line > 2048:
        own.append(_alone(1, line // 2, _warps(line // 2, 8, 4, 16)))
        own.append(_alone(1, 2048, 8))
    kept = [c for c in found if c["parts"] == 1]
    return own + kept if found[0]["parts"] > 1 else kept + own


def shared_gradient_space(
    kept: int, along: bool, slots: int, config: dict[str, Any]
) -> tuple[int, int]:
    """Elements of float32 scratch, and of int32 counters that are zero between launches, for `slots` operands of `kept` elements."""
    if config["parts"] == 1:
        return 0, 0
    block = config["BLOCK_R" if along else "BLOCK_C"]
    tiles = triton.cdiv(kept, block)
    return tiles * config["parts"] * slots * block, tiles


def shared_gradient_launcher(
    op: str, dtype: str, rows: int, columns: int, along: bool, modes: Mapping[str, str],
    steps: tuple[tuple[int, int], tuple[int, int]], config: dict[str, Any], device: torch.device, align: int,
) -> Callable[..., bool]:  # fmt: skip
    """A callable (dy[, a][, b][, y][, da][, db][, dc], space, counter) -> bool over [rows, columns]; all of one dtype.

    `modes` says of dy, a, b and y whether each is "full", a "row", a "column", "one" element (dy alone) or "none" where it is not
    read, and of da, db and dc whether each is "full", a "sum" (over rows; with `along` of each row) or "none". `steps`: of a and
    of b from one row and from one column to the next; all else is contiguous. What `shared_gradient_space` has as 0 may be any tensor.
    """
    names = ("dy", "a", "b", "y", "da", "db", "dc")
    tiles = triton.cdiv(rows, config["BLOCK_R"]) if along else triton.cdiv(columns, config["BLOCK_C"])  # fmt: skip
    pointers = {f"{n}_ptr": dtype for n in names if modes[n] != "none"}
    return prepare(
        shared_gradients, grid=(tiles * config["parts"], 1, 1), pointers={**pointers, "space_ptr": "f32", "counter_ptr": "i32"},
        integers={"M": rows, "N": columns, "PARTS": config["parts"], "a_step": steps[0][0], "b_step": steps[1][0]}, floats=(),
        constexprs={
            "OP": op, **{n.upper(): modes[n] for n in names}, "SLOTS": sum(modes[n] == "sum" for n in ("da", "db", "dc")),
            "SHARED": config["parts"] > 1, "ALONG": along, "A_UNIT": steps[0][1], "B_UNIT": steps[1][1],
            "BLOCK_R": config["BLOCK_R"], "BLOCK_C": config["BLOCK_C"], "BLOCK_P": triton.next_power_of_2(config["parts"]),
        },
        num_warps=config["num_warps"], num_stages=1, device=device, align=align,
    )  # fmt: skip
