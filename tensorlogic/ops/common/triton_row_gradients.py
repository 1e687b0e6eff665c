"""Gradients of element-wise ops with operands that are one row: what is whole is written, what is a row is summed, in one pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.ops.common.triton_columns import (
    arrive,
    backward_configs,
    backward_space,
    gathered,
    leave,
)
from tensorlogic.ops.common.triton_elementwise import combine
from tensorlogic.ops.common.triton_launch import prepare
from tensorlogic.ops.common.triton_math import follow


@triton.jit
def operand(ptr, row, col, step, mask, live, MODE: tl.constexpr, other):
    """Elements of an operand in float32: of a matrix, of a row, or `other` of one that is not read."""
    if MODE == "full":
        v = tl.load(ptr + ((row.to(tl.int64) * step)[:, None] + col[None, :]), mask, other)
    elif MODE == "row":
        v = tl.load(ptr + col, live, other)[None, :]
    elif MODE == "one":
        v = tl.load(ptr)
    else:
        v = tl.full([1, 1], other, tl.float32)
    return v.to(tl.float32)


@triton.jit
def row_gradients(
    dy_ptr, a_ptr, b_ptr, y_ptr, da_ptr, db_ptr, dc_ptr, space_ptr, counter_ptr, M, N, PARTS, a_step, b_step,
    OP: tl.constexpr, DY: tl.constexpr, A: tl.constexpr, B: tl.constexpr, Y: tl.constexpr,
    DA: tl.constexpr, DB: tl.constexpr, DC: tl.constexpr, SLOTS: tl.constexpr, SHARED: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The gradients of `OP` over [M, N] from dy: DA, DB and DC say which are written ("full"), summed over rows ("row") or nobody's
    ("none"); float32, sums too, rounded once.

    What is read is read once. PARTS programs share a column tile (SHARED: more than one); the last to arrive adds their sums in fixed order.
    """
    follow(PDL)
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    col = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    lane = tl.arange(0, BLOCK_R)
    kind: tl.constexpr = dy_ptr.dtype.element_ty
    of_a = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    of_b = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    of_c = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for start in range(part * BLOCK_R, M, PARTS * BLOCK_R):
        row = start + lane
        mask = (row < M)[:, None] & live[None, :]
        at = (row.to(tl.int64) * N)[:, None] + col[None, :]
        dy = tl.where(mask, operand(dy_ptr, row, col, N, mask, live, DY, 0.0), 0.0)
        a = operand(a_ptr, row, col, a_step, mask, live, A, 1.0)
        b = operand(b_ptr, row, col, b_step, mask, live, B, 1.0)
        if OP == "add_relu":
            y = operand(y_ptr, row, col, N, mask, live, Y, 0.0)
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
        elif DA == "row":
            of_a += tl.where(mask, g, 0.0)
        if DB == "full":
            tl.store(db_ptr + at, h.to(kind), mask)
        elif DB == "row":
            of_b += tl.where(mask, h, 0.0)
        if DC == "row":
            of_c += dy
    B_SLOT: tl.constexpr = 1 if DA == "row" else 0
    C_SLOT: tl.constexpr = B_SLOT + (1 if DB == "row" else 0)
    if SHARED:
        if DA == "row":
            leave(space_ptr, tile, part, PARTS, tl.sum(of_a, 0), 0, SLOTS, BLOCK_C)
        if DB == "row":
            leave(space_ptr, tile, part, PARTS, tl.sum(of_b, 0), B_SLOT, SLOTS, BLOCK_C)
        if DC == "row":
            leave(space_ptr, tile, part, PARTS, tl.sum(of_c, 0), C_SLOT, SLOTS, BLOCK_C)
        last = arrive(counter_ptr, tile, PARTS)
        if DA == "row":
            total = gathered(space_ptr, tile, PARTS, last, 0, SLOTS, BLOCK_C, BLOCK_P)
            tl.store(da_ptr + col, total.to(kind), mask=live & last)
        if DB == "row":
            total = gathered(space_ptr, tile, PARTS, last, B_SLOT, SLOTS, BLOCK_C, BLOCK_P)
            tl.store(db_ptr + col, total.to(kind), mask=live & last)
        if DC == "row":
            total = gathered(space_ptr, tile, PARTS, last, C_SLOT, SLOTS, BLOCK_C, BLOCK_P)
            tl.store(dc_ptr + col, total.to(kind), mask=live & last)
    else:
        if DA == "row":
            tl.store(da_ptr + col, tl.sum(of_a, 0).to(kind), mask=live)
        if DB == "row":
            tl.store(db_ptr + col, tl.sum(of_b, 0).to(kind), mask=live)
        if DC == "row":
            tl.store(dc_ptr + col, tl.sum(of_c, 0).to(kind), mask=live)


row_gradient_configs = backward_configs  # (rows, columns, multiprocessors): best guess first


def row_gradient_space(columns: int, slots: int, config: dict[str, Any]) -> tuple[int, int]:
    """Elements of float32 scratch, and of int32 counters that are zero between launches, for `slots` operands that are rows."""
    return backward_space(columns, slots, config)


def row_gradient_launcher(
    op: str,
    dtype: str,
    rows: int,
    columns: int,
    modes: Mapping[str, str],
    steps: tuple[int, int],
    config: dict[str, Any],
    device: torch.device,
    align: int,
) -> Callable[..., bool]:
    """A callable (dy[, a][, b][, y][, da][, db][, dc], space, counter) -> bool over [rows, columns]; all of one dtype.

    `modes` says of dy, a, b and y whether each is "full", a "row", "one" element (dy alone) or "none" where it is not read, and
    of da, db and dc whether each is "full", a "row" or "none". `steps`: from one row of a and b to the next; all else is contiguous.
    """
    names = ("dy", "a", "b", "y", "da", "db", "dc")
    return prepare(
        row_gradients,
        grid=(triton.cdiv(columns, config["BLOCK_C"]) * config["parts"], 1, 1),
        pointers={
            **{f"{n}_ptr": dtype for n in names if modes[n] != "none"},
            "space_ptr": "f32",
            "counter_ptr": "i32",
        },
        integers={
            "M": rows,
            "N": columns,
            "PARTS": config["parts"],
            "a_step": steps[0],
            "b_step": steps[1],
        },
        floats=(),
        constexprs={
            "OP": op,
            **{n.upper(): modes[n] for n in names},
            "SLOTS": sum(modes[n] == "row" for n in ("da", "db", "dc")),
            "SHARED": config["parts"] > 1,
            "BLOCK_R": config["BLOCK_R"],
            "BLOCK_C": config["BLOCK_C"],
            "BLOCK_P": triton.next_power_of_2(config["parts"]),
        },
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=align,
    )
