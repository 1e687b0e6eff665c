"""Triton kernels of precision policies: operands as planes of halves, and what a guard looks at.

`split_planes`: x = h + m with h, m the nearest halves of what is left, written side by side along the inner dimension in any order, so that one half product of [h h m] · [h; m; h] is all terms of the float32 product but the smallest. Or x in float64.
`look_at`: norms, peaks and the norm of the result of every row of left and every column of right, by a sketch of each.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.dtypes import NAMES
from ...system import capture_state
from ..triton_runtime.device_math import follow
from ..triton_runtime.launch import Start, prepare
from .data_statistics import RUN, SKETCH, step

BLOCK_R, BLOCK_C = 16, 128
# rows and columns together of which a program looks at fewer, so that a GPU is occupied
FEW = 2048


@triton.jit
def write_planes(
    x_ptr, y_ptr, flag_ptr, pid, R, C, stride_r, stride_c,
    COUNT: tl.constexpr, PATTERN: tl.constexpr, DOWN: tl.constexpr, LIFT: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One tile of x [R, C]: slot s of y gets plane PATTERN[s], side by side [R, COUNT C], or below each other [COUNT R, C]."""
    across = tl.cdiv(C, BLOCK_C)
    rows = (pid // across) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = (pid % across) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = (rows < R)[:, None] & (cols < C)[None, :]
    at = rows.to(tl.int64)[:, None] * stride_r + cols.to(tl.int64)[None, :] * stride_c
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    half = y_ptr.dtype.element_ty
    if half == tl.float64:  # which holds all of them
        tl.store(y_ptr + rows.to(tl.int64)[:, None] * C + cols[None, :], x.to(half), mask=inside)
    else:
        x = x.to(tl.float32)
        h = x.to(half)
        rest = x - h.to(tl.float32)
        m = (rest * (1 << LIFT)).to(half)
        spoilt = tl.sum((rest - rest != 0.0).to(tl.int32))  # h or x is not finite
        if spoilt > 0:
            tl.atomic_add(flag_ptr, 1)
        for s in tl.static_range(COUNT):
            value = h
            if (PATTERN >> s) & 1:
                value = m
            if DOWN:
                to = (s * R + rows).to(tl.int64)[:, None] * C + cols[None, :]
            else:
                to = rows.to(tl.int64)[:, None] * (COUNT * C) + (s * C + cols)[None, :]
            tl.store(y_ptr + to, value, mask=inside)


@triton.jit
def split_planes(
    a_ptr, b_ptr, x_ptr, y_ptr, flag_ptr, A_R, A_C, a_r, a_c, B_R, B_C, b_r, b_c,
    COUNT: tl.constexpr, A_PATTERN: tl.constexpr, B_PATTERN: tl.constexpr, A_DOWN: tl.constexpr, B_DOWN: tl.constexpr,
    LIFT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Planes of a [A_R, A_C] to x, and, where there is a second operand, of b to y: one launch for both."""
    follow(PDL)
    pid = tl.program_id(0)
    first = tl.cdiv(A_R, BLOCK_R) * tl.cdiv(A_C, BLOCK_C)
    if pid < first:
        write_planes(
            a_ptr, x_ptr, flag_ptr, pid, A_R, A_C, a_r, a_c, COUNT, A_PATTERN, A_DOWN, LIFT, BLOCK_R, BLOCK_C
        )  # fmt: skip
    elif b_ptr is not None:
        write_planes(
            b_ptr, y_ptr, flag_ptr, pid - first, B_R, B_C, b_r, b_c, COUNT, B_PATTERN, B_DOWN, LIFT, BLOCK_R, BLOCK_C
        )  # fmt: skip


@triton.jit
def look_at(
    left_ptr, right_ptr, out_ptr, found_ptr, flag_ptr,
    M, N, K, left_r, left_c, right_r, right_c, out_r, out_c, STEP_M, STEP_N, STEP_K,
    BLOCK: tl.constexpr, SKETCH: tl.constexpr, RUN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """found[p] = (sum of norms², largest norm² / result's norm², largest peak² / norm², least peak, largest peak, results of 0) of
    BLOCK rows of left (then columns of right), each by SKETCH elements."""
    follow(PDL)
    p = tl.program_id(0)
    blocks = tl.cdiv(M, BLOCK)
    one = tl.arange(0, SKETCH)
    at, within = one // RUN, one % RUN
    k = (at * STEP_K + within).to(tl.int64)
    if p < blocks:
        i = (p * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        o = (at * STEP_N + within).to(tl.int64)
        inside = i < M
        x = tl.load(
            left_ptr + i[:, None] * left_r + k[None, :] * left_c,
            mask=inside[:, None] & (k < K)[None, :], other=0.0,
        ).to(tl.float64)  # fmt: skip
        y = tl.load(
            out_ptr + i[:, None] * out_r + o[None, :] * out_c,
            mask=inside[:, None] & (o < N)[None, :], other=0.0,
        ).to(tl.float64)  # fmt: skip
    else:
        i = ((p - blocks) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
        o = (at * STEP_M + within).to(tl.int64)
        inside = i < N
        x = tl.load(
            right_ptr + i[:, None] * right_c + k[None, :] * right_r,
            mask=inside[:, None] & (k < K)[None, :], other=0.0,
        ).to(tl.float64)  # fmt: skip
        y = tl.load(
            out_ptr + i[:, None] * out_c + o[None, :] * out_r,
            mask=inside[:, None] & (o < M)[None, :], other=0.0,
        ).to(tl.float64)  # fmt: skip
    square, result = tl.sum(x * x, 1), tl.sum(y * y, 1)
    peak = tl.max(tl.abs(x), 1)
    there = square > 0
    told = result > 0
    share = tl.where(told, square / tl.where(told, result, 1.0), 0.0)
    crest = tl.where(there, peak * peak / tl.where(there, square, 1.0), 0.0)
    base = found_ptr + 6 * p
    bad = tl.sum((x - x != 0.0).to(tl.int32)) + tl.sum((y - y != 0.0).to(tl.int32))
    tl.store(base, tl.where(bad > 0, float("nan"), tl.sum(square)))
    tl.store(base + 1, tl.max(share))
    tl.store(base + 2, tl.max(crest))
    tl.store(base + 3, tl.min(tl.where(peak > 0, peak, float("inf"))))
    tl.store(base + 4, tl.max(peak))
    tl.store(base + 5, tl.sum((there & (result == 0.0)).to(tl.float64)))
    if p == 0:
        tl.store(found_ptr + 6 * tl.num_programs(0), tl.load(flag_ptr).to(tl.float64))
        tl.store(flag_ptr, 0)


_FLAGS: dict[tuple[int, int], Tensor] = {}


def stream(device: torch.device) -> int:
    """The current stream of a device, by a number; below 0 while it is captured."""
    if device.type != "cuda":
        return 0
    if torch.cuda.is_current_stream_capturing():
        return -1
    index = torch.cuda.current_device() if device.index is None else device.index
    return int(torch._C._cuda_getCurrentRawStream(index))


def flag(device: torch.device) -> Tensor:
    """Where kernels of this stream note that a value did not fit, or was not finite; `look` and `noted` read and clear it.

    Kernels that are captured have their graph's, one for each of its streams, which every replay clears: graphs may run side by
    side. Those of a graph that is not known share one, which no graph owns where any kernel ran before.
    """
    place = (-1, 0)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        place = (index, stream(device))
        if place[1] < 0:
            number = torch._C._cuda_getCurrentRawStream(index)
            own = capture_state.own(number)
            if own is not None:
                if ("flag", number) not in own:
                    own["flag", number] = torch.zeros(1, dtype=torch.int32, device=device)
                noting: Tensor = own["flag", number]
                return noting
    found = _FLAGS.get(place)
    if found is None and place[1] < 0:
        found = next((kept for (owner, _), kept in _FLAGS.items() if owner == place[0]), None)
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


def names(*tensors: Tensor) -> tuple[str, ...]:
    """Of their element types."""
    return tuple(NAMES[t.dtype] for t in tensors)


def aligned(*tensors: Tensor) -> int:
    """Bytes, at most 16, that all of them are aligned to."""
    pointers = 16
    for t in tensors:
        pointers |= t.data_ptr()
    return pointers & -pointers


# shape, strides, pattern, down
Planes = tuple[tuple[int, int], tuple[int, int], tuple[int, ...], bool]


@lru_cache(maxsize=1024)
def _split(
    kinds: tuple[str, ...], operands: tuple[Planes, ...], lift: int, align: int, device: torch.device
) -> Start:  # fmt: skip
    """For one operand or two: `kinds` are those of the operands, then that of the planes."""
    grid = 0
    integers: dict[str, int] = {}
    constexprs: dict[str, int] = {"COUNT": len(operands[0][2])}
    pointers = dict(zip(("a_ptr", "b_ptr"), kinds[:-1], strict=False))
    for name, (shape, stride, pattern, down) in zip("AB", operands, strict=False):
        pointers["x_ptr" if name == "A" else "y_ptr"] = kinds[-1]
        grid += triton.cdiv(shape[0], BLOCK_R) * triton.cdiv(shape[1], BLOCK_C)
        low = name.lower()
        integers |= {f"{name}_R": shape[0], f"{name}_C": shape[1], f"{low}_r": stride[0], f"{low}_c": stride[1]}  # fmt: skip
        constexprs |= {f"{name}_PATTERN": sum(p << s for s, p in enumerate(pattern)), f"{name}_DOWN": down}  # fmt: skip
    for missing in ("B_PATTERN", "B_DOWN"):
        constexprs.setdefault(missing, 0)
    order = ("COUNT", "A_PATTERN", "B_PATTERN", "A_DOWN", "B_DOWN")
    return prepare(
        split_planes, grid=(grid, 1, 1), pointers={**pointers, "flag_ptr": "i32"}, integers=integers,
        constexprs={**{k: constexprs[k] for k in order}, "LIFT": lift, "BLOCK_R": BLOCK_R, "BLOCK_C": BLOCK_C},
        num_warps=4, device=device, align=min(align, 4),
    )  # fmt: skip


def _laid(x: Tensor, pattern: tuple[int, ...], down: bool) -> tuple[bool, Planes, tuple[int, int]]:
    """(whether x is taken transposed, as it then lies, the shape of its planes)."""
    turned = x.stride(0) == 1 and x.stride(1) != 1
    x, down = (x.t(), not down) if turned else (x, down)
    (rows, columns), count = x.shape, len(pattern)
    shape = (count * rows, columns) if down else (rows, count * columns)
    return turned, ((rows, columns), (x.stride(0), x.stride(1)), pattern, down), shape


@lru_cache(maxsize=1024)
def _look(
    kinds: tuple[str, ...], sizes: tuple[int, int, int], strides: tuple[int, ...], align: int, device: torch.device,
) -> Start:  # fmt: skip
    m, n, k = sizes
    order = ("left_r", "left_c", "right_r", "right_c", "out_r", "out_c")
    return prepare(
        look_at, grid=(blocks(m, n)[1], 1, 1),
        pointers={
            "left_ptr": kinds[0], "right_ptr": kinds[1], "out_ptr": kinds[2], "found_ptr": "f64", "flag_ptr": "i32",
        },
        integers={
            "M": m, "N": n, "K": k, **dict(zip(order, strides, strict=True)),
            "STEP_M": step(m), "STEP_N": step(n), "STEP_K": step(k),
        },
        constexprs={"BLOCK": lines(m, n), "SKETCH": SKETCH, "RUN": RUN}, num_warps=4,
        device=device, align=align,
    )  # fmt: skip


def blocks(m: int, n: int) -> tuple[int, int]:
    """Programs that look at rows, and all of them."""
    each = lines(m, n)
    rows = triton.cdiv(m, each)
    return rows, rows + triton.cdiv(n, each)


def lines(m: int, n: int) -> int:
    """Rows (or columns) that one program looks at."""
    return 16 if m + n <= FEW else 32


def sketch(left: Tensor, right: Tensor, out: Tensor) -> tuple[Tensor, int]:
    """(a row of six for every block of rows, then of columns, and whether any kernel noted a value; how many are of rows)."""
    (m, k), n = left.shape, right.shape[1]
    rows, every = blocks(m, n)
    found = torch.empty(6 * every + 1, dtype=torch.float64, device=left.device)
    strides = (*left.stride(), *right.stride(), *out.stride())
    align = min(aligned(left, right, out), 2 if left.element_size() == 2 else 4)
    start = _look(names(left, right, out), (m, n, k), strides, align, left.device)
    if not start(left, right, out, found, flag(left.device)):
        raise RuntimeError("look: the kernel refused tensors of the alignment it was built for")
    return found, rows


def look(left: Tensor, right: Tensor, out: Tensor) -> tuple[Any, int, bool]:
    """(a row of six for every block of rows, then of columns, in NumPy; how many are of rows; whether any kernel noted a value).

    Waits for the device.
    """
    found, rows = sketch(left, right, out)
    host = found.cpu().numpy()
    return host[:-1].reshape(-1, 6), rows, bool(host[-1])
