"""Reductions of few, long rows that begin at odd places, or of everything: several programs share a row; one launch, deterministic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.reduce.contiguous import EMPTY, finish, fold, merge
from tensorlogic.kernels.row_access.split import configs_of, fits, share_of, span_of, tile_of
from tensorlogic.kernels.triton_runtime.config_check import fitting
from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def reduce_shares(
    x_ptr, y_ptr, partial_ptr, counter_ptr, R, C, SPAN, PARTS, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[r] = reduce x[r, :C], PARTS programs a row; float32. The program that comes last combines what they left in fixed order and
    sets the row's counter back to 0."""
    follow(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    begin, length, at, some = share_of(R, C, SPAN, WIDTH)
    lane = tl.arange(0, LANES * WIDTH)
    ends = tl.load(x_ptr + at, mask=some, other=EMPTY).to(tl.float32)
    whole = length // (LANES * WIDTH) * (LANES * WIDTH)
    x = tl.load(x_ptr + begin + whole + lane, mask=lane < length - whole, other=EMPTY)
    acc = x.to(tl.float32)
    for start in range(0, whole, LANES * WIDTH):
        acc = merge(acc, tl.load(x_ptr + begin + start + lane).to(tl.float32), KIND)
    total = merge(fold(acc, 0, KIND), fold(ends, 0, KIND), KIND)
    tl.store(partial_ptr + row * PARTS + part, total)
    tl.debug_barrier()
    if tl.atomic_add(counter_ptr + row, 1, sem="acq_rel") == PARTS - 1:
        p = tl.arange(0, PADDED)
        lies = partial_ptr + row * PARTS + p
        every = tl.load(lies, mask=p < PARTS, other=EMPTY, cache_modifier=".cg")
        value = finish(fold(every, 0, KIND), COUNT, KIND)
        tl.store(y_ptr + row, value.to(y_ptr.dtype.element_ty))
        tl.store(counter_ptr + row, 0)


MOST_PARTS = 2048  # of a row, which one program adds up
SHAPES = ((4, 4, 8), (8, 4, 4), (4, 2, 8), (4, 1, 8), (8, 2, 2), (16, 2, 2))  # warps, groups of a thread, programs a multiprocessor  # fmt: skip


def shares_configs(rows: int, columns: int, dtype: str, cores: int = 132) -> list[dict[str, Any]]:
    """Configurations, best guess first: programs of a row, and groups that one of them reads at once."""
    return configs_of(SHAPES, MOST_PARTS, rows, columns, dtype, cores)


def shares_workspace(rows: int, columns: int, config: dict[str, Any]) -> tuple[int, int]:
    """How many float32 partials and how many int32 counters (zero before the first call) a launch needs."""
    return rows * int(triton.cdiv(columns, span_of(columns, config["parts"]))), rows


def shares_launcher(
    kind: str, dtype: str, rows: int, columns: int, config: dict[str, Any], device: torch.device
) -> Callable[..., bool]:
    """A callable (x, y, partial, counter) -> bool for `kind` in "sum", "mean", "max", "min": contiguous [rows, columns] at a 16-byte
    address -> [rows]; partial and counter as `shares_workspace` says."""
    span, lanes = span_of(columns, config["parts"]), config["LANES"]
    parts = int(triton.cdiv(columns, span))
    right = parts <= MOST_PARTS and fits(columns, parts, tile_of(lanes, dtype))
    fitting(right, kind, config, f"rows of {columns}")
    return prepare(
        reduce_shares,
        grid=(rows, parts, 1),
        pointers={"x_ptr": dtype, "y_ptr": dtype, "partial_ptr": "f32", "counter_ptr": "i32"},
        integers={"R": rows, "C": columns, "SPAN": span, "PARTS": parts, "COUNT": columns},
        constexprs={
            "KIND": kind,
            "EMPTY": EMPTY[kind],
            "LANES": lanes,
            "WIDTH": 16 // SIZES[dtype],
            "PADDED": triton.next_power_of_2(parts),
        },
        num_warps=config["num_warps"],
        device=device,
        align=16,
    )
