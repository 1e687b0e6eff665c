"""Reductions of a tensor that lies in the cache to one value: one wave of programs, whose last one spins for the others' results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.reduce.contiguous import EMPTY, finish, fold, merge
from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def spin(ptrs, launch, live):
    """The lower half of each 64-bit cell once its upper half is `launch`; 0 where not live. Each thread waits for its own."""
    return tl.inline_asm_elementwise(
        "{ .reg .pred p, q; .reg .b64 c; .reg .b32 lo, hi; setp.ne.s32 q, $3, 0; mov.b32 lo, 0; mov.b32 hi, $2;\n"
        "SPIN: @q ld.relaxed.gpu.global.b64 c, [$1]; @q mov.b64 {lo, hi}, c; setp.ne.u32 p, hi, $2; @p bra SPIN;\n"
        "mov.b32 $0, lo; }",
        "=r,l,r,r",
        [ptrs.to(tl.int64), launch, live.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def reduce_spun(
    x_ptr, y_ptr, cell_ptr, N, PARTS, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, EVEN: tl.constexpr, WIDTH: tl.constexpr, COMPILED: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = reduce x[:N], N <= BLOCK PARTS, accumulated in float32 as a tree; the same bits every run.

    As `reduce_polled`: a program leaves its result and the number of the launch in one 64-bit cell, and the last program
    combines them in fixed order and counts the launch in cell 0. Here a program reads one tile, without a loop, and each
    thread of the last one waits for its own cells, without a barrier. Float16 on an H200: 1 Mi elements 2.0 us where that takes 2.6,
    8 Mi 3.9 (5.6), the memory's speed.
    Without COMPILED, in the interpreter, programs run one after another and nobody waits.
    """
    follow(PDL)
    part = tl.program_id(0)
    launch = (tl.load(cell_ptr) + 1).to(tl.int32)
    at = part * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        value = fold(tl.load(x_ptr + at).to(tl.float32), 0, KIND)
    else:
        # whole groups of WIDTH in one access each, what is left by the last program
        whole = tl.multiple_of(N // WIDTH * WIDTH, WIDTH)
        x = tl.load(x_ptr + at, mask=at < whole, other=EMPTY)
        left = whole + tl.arange(0, WIDTH)
        tail = tl.load(x_ptr + left, mask=(left < N) & (part == PARTS - 1), other=EMPTY)
        value = merge(fold(x.to(tl.float32), 0, KIND), fold(tail.to(tl.float32), 0, KIND), KIND)
    if part < PARTS - 1:
        bits = value.to(tl.uint32, bitcast=True).to(tl.int64)
        tl.store(cell_ptr + 1 + part, (launch.to(tl.int64) << 32) | bits)
    else:
        p = tl.arange(0, BLOCK_P)
        others = p < PARTS - 1
        if COMPILED:
            found = spin(cell_ptr + 1 + p, launch, others).to(tl.float32, bitcast=True)
        else:
            cells = tl.load(cell_ptr + 1 + p, mask=others, other=0)
            found = (cells & 0xFFFFFFFF).to(tl.uint32).to(tl.float32, bitcast=True)
        every = tl.where(others, found, tl.where(p == PARTS - 1, value, EMPTY))
        y = finish(fold(every, 0, KIND), COUNT, KIND)
        tl.store(y_ptr, y.to(y_ptr.dtype.element_ty))
        tl.store(cell_ptr, launch.to(tl.int64))


LEAST = 2**14  # elements for which one wave of programs is worth it
MOST_PARTS = 1024


def spun_configs(count: int, dtype: str) -> list[dict[str, Any]]:
    """Configurations for `count` elements, best guess first; none below LEAST elements, or above 32 MB."""
    wide = 2 if dtype == "f32" else 1
    if count <= 2**16:
        tiles = [(16384, 16), (8192, 8), (4096, 8)]
    elif count <= 2**19:
        tiles = [(4096, 8), (4096, 4), (8192, 8)]
    else:
        tiles = [(8192, 8), (16384, 8), (16384, 16)]
    return [
        {"BLOCK": block // wide, "num_warps": warps}
        for block, warps in tiles
        if count >= LEAST and 2 <= -(-count * wide // block) <= MOST_PARTS
    ]


def spun_parts(count: int, config: dict[str, Any]) -> int:
    """Programs of a launch, and int64 cells that it needs: zero before the first launch, shared with nothing else."""
    return -(-count // int(config["BLOCK"]))


def spun_launcher(
    kind: str, dtype: str, out_dtype: str, count: int, config: dict[str, Any], device: torch.device, align: int = 16
) -> Callable[..., bool]:  # fmt: skip
    """A callable (x, y, cells) -> bool for `kind` in "sum", "mean", "max", "min" over contiguous x of `count` elements."""
    parts = spun_parts(count, config)
    return prepare(
        reduce_spun,
        grid=(parts, 1, 1),
        pointers={"x_ptr": dtype, "y_ptr": out_dtype, "cell_ptr": "i64"},
        integers={"N": count, "PARTS": parts, "COUNT": count},
        constexprs={
            "KIND": kind, "EMPTY": EMPTY[kind], "EVEN": count % config["BLOCK"] == 0, "WIDTH": 4 if dtype == "f32" else 8, "COMPILED": device.type == "cuda",
            "BLOCK": config["BLOCK"], "BLOCK_P": triton.next_power_of_2(parts),
        },
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )  # fmt: skip
