"""Reductions of rows that begin at odd places: whole aligned groups of 16 bytes, and the ends of a row apart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.reduce.contiguous import EMPTY, finish, fold, merge
from tensorlogic.kernels.row_access.ragged import held, launcher, parts_of, tiles
from tensorlogic.kernels.triton_runtime.device_math import follow


@triton.jit
def reduce_groups(
    x_ptr, y_ptr, R, C, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """y[r] = reduce x[r, :C] of ROWS rows, all TILES tiles of which are asked for before the first is used; float32."""
    follow(PDL)
    lane = tl.arange(0, LANES * WIDTH)
    first = tl.program_id(0).to(tl.int64) * ROWS
    ends, read = (), ()
    for r in tl.static_range(ROWS):
        begin, length, at, some = parts_of(first + r, R, C, WIDTH)
        e = tl.load(x_ptr + at, mask=some, other=EMPTY)
        ends = ends + (e,)  # type: ignore[assignment]  # noqa: RUF005  (Triton has no stars)
        for k in tl.static_range(TILES):
            inside = lane < length - k * (LANES * WIDTH)
            x = tl.load(x_ptr + begin + k * (LANES * WIDTH) + lane, mask=inside, other=EMPTY)
            read = read + (x,)  # type: ignore[assignment]  # noqa: RUF005
    for r in tl.static_range(ROWS):
        acc = read[r * TILES].to(tl.float32)  # type: ignore[var-annotated]
        for k in tl.static_range(1, TILES):
            acc = merge(acc, read[r * TILES + k].to(tl.float32), KIND)
        total = merge(fold(acc, 0, KIND), fold(ends[r].to(tl.float32), 0, KIND), KIND)
        y = finish(total, COUNT, KIND).to(y_ptr.dtype.element_ty)
        tl.store(y_ptr + first + r, y, mask=first + r < R)


@triton.jit
def reduce_groups_swept(
    x_ptr, y_ptr, R, C, COUNT,
    KIND: tl.constexpr, EMPTY: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The same for rows of any length, a program each."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    begin, length, at, some = parts_of(row, R, C, WIDTH)
    lane = tl.arange(0, LANES * WIDTH)
    ends = tl.load(x_ptr + at, mask=some, other=EMPTY).to(tl.float32)
    acc = tl.full([LANES * WIDTH], EMPTY, tl.float32)
    for start in range(0, length, LANES * WIDTH):
        x = tl.load(x_ptr + begin + start + lane, mask=lane < length - start, other=EMPTY)
        acc = merge(acc, x.to(tl.float32), KIND)
    total = merge(fold(acc, 0, KIND), fold(ends, 0, KIND), KIND)
    tl.store(y_ptr + row, finish(total, COUNT, KIND).to(y_ptr.dtype.element_ty))


SWEPT = ((4, 4), (8, 4), (8, 2), (16, 2))  # warps, groups of a thread


def groups_configs(columns: int, dtype: str) -> list[dict[str, Any]]:
    """Configurations, best guess first: rows that are read at once, and "swept" ones."""
    found = [
        {"strategy": "held", "ROWS": rows, "num_warps": warps}
        for rows, warps in sorted(held(columns, dtype, 1), key=lambda pair: -pair[0])
        if warps <= 16
    ]
    swept = [
        {"strategy": "swept", "LANES": 32 * warps * loads, "num_warps": warps}
        for warps, loads in SWEPT
    ]
    return found[:6] + (swept if tiles(columns, dtype, 4) > 1 else [])


def groups_launcher(
    kind: str, dtype: str, rows: int, columns: int, config: dict[str, Any], device: torch.device
) -> Callable[..., bool]:
    """A callable (x, y) -> bool for `kind` in "sum", "mean", "max", "min": contiguous [rows, columns] at a 16-byte address -> [rows]."""
    kernel = reduce_groups if config["strategy"] == "held" else reduce_groups_swept
    about = (kernel, kind, rows, columns, dtype, config, device, ("x", "y"))
    return launcher(*about, KIND=kind, EMPTY=EMPTY[kind])
