"""Triton kernels of precision policies: operands as planes of halves, and what a guard looks at.

`split_planes`: x = h + m + l with h, m, l the nearest halves of what is left, written side by side along the inner dimension
in any order, so that one half product of [h h m] · [h; m; h] is all terms of the float32 product but the smallest.
`look_at`: for a sample of rows of left and columns of right, their norm and peak, and the norm of that row or column of the
product, in float64; one program a row.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...numerics import NAMES
from .triton_launch import Start, prepare

BLOCK_R, BLOCK_C = 16, 128


@triton.jit
def split_planes(
    x_ptr, y_ptr, flag_ptr, R, C, stride_r, stride_c,
    COUNT: tl.constexpr, PATTERN: tl.constexpr, DOWN: tl.constexpr, LIFT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Slot s of y gets plane PATTERN[s] of x [R, C]: side by side [R, COUNT C], or below each other [COUNT R, C]."""
    across = tl.cdiv(C, BLOCK_C)
    pid = tl.program_id(0)
    rows = (pid // across) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = (pid % across) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    half = y_ptr.dtype.element_ty
    h = x.to(half)
    rest = x - h.to(tl.float32)
    m = (rest * (1 << LIFT)).to(half)
    low = (rest * (1 << LIFT) - m.to(tl.float32)).to(half)
    spoilt = tl.sum((rest - rest != 0.0).to(tl.int32))  # h or x is not finite
    if spoilt > 0:
        tl.atomic_add(flag_ptr, 1)
    for s in tl.static_range(COUNT):
        plane = (PATTERN >> (2 * s)) & 3
        value = h
        if plane == 1:
            value = m
        if plane == 2:
            value = low
        if DOWN:
            to = (s * R + rows).to(tl.int64)[:, None] * C + cols[None, :]
        else:
            to = rows.to(tl.int64)[:, None] * (COUNT * C) + (s * C + cols)[None, :]
        tl.store(y_ptr + to, value, mask=inside)


@triton.jit
def look_at(
    left_ptr, right_ptr, out_ptr, found_ptr, flag_ptr,
    M, N, K, left_r, left_c, right_r, right_c, out_r, out_c, STEP_M, STEP_N, COUNT_M,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """found[p] = (norm² of the operand's row or column, its peak, norm² of the product's)."""
    p = tl.program_id(0)
    k = tl.arange(0, BLOCK)
    square = tl.zeros([BLOCK], tl.float64)
    peak = tl.zeros([BLOCK], tl.float64)
    whole = tl.zeros([BLOCK], tl.float64)
    if p < COUNT_M:
        i = (p * STEP_M).to(tl.int64)
        for start in range(0, K, BLOCK):
            at = (start + k).to(tl.int64)
            x = tl.load(left_ptr + i * left_r + at * left_c, mask=at < K, other=0.0).to(tl.float64)
            square += x * x
            peak = tl.maximum(peak, tl.abs(x))
        for start in range(0, N, BLOCK):
            at = (start + k).to(tl.int64)
            x = tl.load(out_ptr + i * out_r + at * out_c, mask=at < N, other=0.0).to(tl.float64)
            whole += x * x
    else:
        j = ((p - COUNT_M) * STEP_N).to(tl.int64)
        for start in range(0, K, BLOCK):
            at = (start + k).to(tl.int64)
            x = tl.load(right_ptr + at * right_r + j * right_c, mask=at < K, other=0.0)
            x = x.to(tl.float64)
            square += x * x
            peak = tl.maximum(peak, tl.abs(x))
        for start in range(0, M, BLOCK):
            at = (start + k).to(tl.int64)
            x = tl.load(out_ptr + at * out_r + j * out_c, mask=at < M, other=0.0).to(tl.float64)
            whole += x * x
    tl.store(found_ptr + 3 * p, tl.sum(square))
    tl.store(found_ptr + 3 * p + 1, tl.max(peak))
    tl.store(found_ptr + 3 * p + 2, tl.sum(whole))
    if p == 0:
        tl.store(found_ptr + 3 * tl.num_programs(0), tl.load(flag_ptr).to(tl.float64))
        tl.store(flag_ptr, 0)


_FLAGS: dict[tuple[int, int], Tensor] = {}


def flag(device: torch.device) -> Tensor:
    """Where kernels of this stream note that a value did not fit, or was not finite; `look` and `noted` read and clear it."""
    index = device.index
    if device.type == "cuda":
        index = torch.cuda.current_device() if index is None else index
        place = (index, torch._C._cuda_getCurrentRawStream(index))
    else:
        place = (-1, 0)
    found = _FLAGS.get(place)
    if found is None:
        found = _FLAGS[place] = torch.zeros(1, dtype=torch.int32, device=device)
    return found


def noted(device: torch.device) -> bool:
    """Whether a kernel of this stream has noted a value since it was last asked; waits for the device."""
    found = flag(device)
    seen = bool(found.item())
    if seen:
        found.zero_()
    return seen


def _names(*tensors: Tensor) -> tuple[str, ...]:
    return tuple(NAMES[t.dtype] for t in tensors)


def _align(*tensors: Tensor) -> int:
    pointers = 16
    for t in tensors:
        pointers |= t.data_ptr()
    return pointers & -pointers


@lru_cache(maxsize=1024)
def _split(
    names: tuple[str, str], shape: tuple[int, int], stride: tuple[int, int],
    pattern: tuple[int, ...], down: bool, lift: int, align: int, device: torch.device,
) -> Start:  # fmt: skip
    rows, columns = shape
    grid = triton.cdiv(rows, BLOCK_R) * triton.cdiv(columns, BLOCK_C)
    return prepare(
        split_planes, grid=(grid, 1, 1),
        pointers={"x_ptr": names[0], "y_ptr": names[1], "flag_ptr": "i32"},
        integers={"R": rows, "C": columns, "stride_r": stride[0], "stride_c": stride[1]}, floats=(),
        constexprs={
            "COUNT": len(pattern), "PATTERN": sum(p << (2 * s) for s, p in enumerate(pattern)), "DOWN": down, "LIFT": lift,
            "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C,
        },
        num_warps=4, num_stages=1, device=device, align=min(align, 4),
    )  # fmt: skip


def split(
    x: Tensor, dtype: torch.dtype, pattern: tuple[int, ...], down: bool, lift: int = 0
) -> Tensor:
    """The planes of x [R, C] that `pattern` names, side by side (or below each other), laid out as x lies.

    All planes but the first are multiplied by 2 ** lift.
    """
    if x.stride(0) == 1 and x.stride(1) != 1:
        return split(x.t(), dtype, pattern, not down, lift).t()
    rows, columns = x.shape
    count = len(pattern)
    shape = (count * rows, columns) if down else (rows, count * columns)
    y = torch.empty(shape, dtype=dtype, device=x.device)
    stride = (x.stride(0), x.stride(1))
    start = _split(_names(x, y), (rows, columns), stride, pattern, down, lift, _align(x), x.device)
    if not start(x, y, flag(x.device)):
        raise RuntimeError("split: the kernel refused tensors of the alignment it was built for")
    return y


@lru_cache(maxsize=1024)
def _look(
    names: tuple[str, ...], sizes: tuple[int, int, int], strides: tuple[int, ...],
    counts: tuple[int, int, int, int], align: int, device: torch.device,
) -> Start:  # fmt: skip
    step_m, step_n, count_m, count_n = counts
    order = ("left_r", "left_c", "right_r", "right_c", "out_r", "out_c")
    return prepare(
        look_at, grid=(count_m + count_n, 1, 1),
        pointers={
            "left_ptr": names[0], "right_ptr": names[1], "out_ptr": names[2], "found_ptr": "f64", "flag_ptr": "i32",
        },
        integers={
            "M": sizes[0], "N": sizes[1], "K": sizes[2], **dict(zip(order, strides, strict=True)),
            "STEP_M": step_m, "STEP_N": step_n, "COUNT_M": count_m,
        },
        floats=(), constexprs={"BLOCK": 512}, num_warps=4, num_stages=1, device=device, align=align,
    )  # fmt: skip


def look(left: Tensor, right: Tensor, out: Tensor, rows: int) -> tuple[Any, int, bool]:
    """(samples [P, 3] as a NumPy array, how many of them are rows, whether any kernel noted a value); waits for the device."""
    (m, k), n = left.shape, right.shape[1]
    step_m, step_n = max(1, m // rows), max(1, n // rows)
    count_m, count_n = -(-m // step_m), -(-n // step_n)
    found = torch.empty(3 * (count_m + count_n) + 1, dtype=torch.float64, device=left.device)
    strides = (*left.stride(), *right.stride(), *out.stride())
    start = _look(
        _names(left, right, out), (m, n, k), strides, (step_m, step_n, count_m, count_n),
        min(_align(left, right, out), 2 if left.element_size() == 2 else 4), left.device,
    )  # fmt: skip
    if not start(left, right, out, found, flag(left.device)):
        raise RuntimeError("look: the kernel refused tensors of the alignment it was built for")
    host = found.cpu().numpy()
    return host[:-1].reshape(-1, 3), count_m, bool(host[-1])
