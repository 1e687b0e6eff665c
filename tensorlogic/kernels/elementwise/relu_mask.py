"""ReLU whose forward pass marks, in a bit an element, where its output is above 0, and its gradient from these marks: what backward reads
of forward is a sixteenth of a 16-bit output, a thirty-second of a float32 one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import follow, relu
from tensorlogic.kernels.triton_runtime.launch import prepare

BITS = tl.constexpr(8)  # of a mark: one byte is a thread's


@triton.jit
def group_of(ptr, base, live, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Elements [BLOCK / 8, 8] from `base` on, 8 neighbours beside one another; float32."""
    lane = tl.arange(0, BLOCK // BITS)[:, None] * BITS + tl.arange(0, BITS)[None, :]
    if MASKED:
        return tl.load(ptr + base + lane, mask=lane < live, other=0.0).to(tl.float32)
    return tl.load(ptr + base + lane).to(tl.float32)


@triton.jit
def put_group(ptr, base, v, live, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    """Writes them."""
    lane = tl.arange(0, BLOCK // BITS)[:, None] * BITS + tl.arange(0, BITS)[None, :]
    if MASKED:
        tl.store(ptr + base + lane, v, mask=lane < live)
    else:
        tl.store(ptr + base + lane, v)


@triton.jit
def marked_tile(
    a_ptr, b_ptr, y_ptr, mark_ptr, base, live, ADDS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A tile of `relu_fwd_marked`, of whose elements `live` are there."""
    x = group_of(a_ptr, base, live, MASKED, BLOCK)
    if ADDS:
        x += group_of(b_ptr, base, live, MASKED, BLOCK)
    y = relu(x.to(y_ptr.dtype.element_ty).to(tl.float32))  # a sum that rounds to 0 has no gradient
    put_group(y_ptr, base, y.to(y_ptr.dtype.element_ty), live, MASKED, BLOCK)
    above = tl.where(y <= 0.0, 0, 1)  # NaN hands its gradient on
    mark = tl.sum(above << tl.arange(0, BITS)[None, :], 1).to(tl.uint8)
    group = tl.arange(0, BLOCK // BITS)
    if MASKED:
        tl.store(mark_ptr + base // BITS + group, mark, mask=group * BITS < live)
    else:
        tl.store(mark_ptr + base // BITS + group, mark)


@triton.jit
def relu_fwd_marked(
    a_ptr, b_ptr, y_ptr, mark_ptr, N, ADDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """y = relu(a), or relu(a + b) where it ADDS, over N contiguous elements; mark[i], uint8, has a bit for each of y's elements 8 i to
    8 i + 7, the lowest for the first: set where y is above 0 or NaN."""
    follow(PDL)
    base = tl.program_id(0).to(tl.int64) * BLOCK
    if base + BLOCK <= N:
        marked_tile(a_ptr, b_ptr, y_ptr, mark_ptr, base, BLOCK, ADDS, False, BLOCK)
    else:
        live = (N - base).to(tl.int32)
        marked_tile(a_ptr, b_ptr, y_ptr, mark_ptr, base, live, ADDS, True, BLOCK)


@triton.jit
def unmarked_tile(
    dy_ptr, mark_ptr, dx_ptr, base, live, ONE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A tile of `relu_bwd_marked`, of whose elements `live` are there."""
    group = tl.arange(0, BLOCK // BITS)
    if MASKED:
        mark = tl.load(mark_ptr + base // BITS + group, mask=group * BITS < live, other=0)
    else:
        mark = tl.load(mark_ptr + base // BITS + group)
    above = (mark.to(tl.int32)[:, None] >> tl.arange(0, BITS)[None, :]) & 1
    dy = tl.load(dy_ptr).to(tl.float32) if ONE else group_of(dy_ptr, base, live, MASKED, BLOCK)
    dx = tl.where(above != 0, dy, 0.0).to(dx_ptr.dtype.element_ty)
    put_group(dx_ptr, base, dx, live, MASKED, BLOCK)


@triton.jit
def relu_bwd_marked(
    dy_ptr, mark_ptr, dx_ptr, N, ONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """dx = dy where `relu_fwd_marked` left a mark, else 0, over N contiguous elements; dy is a single number where it is ONE."""
    follow(PDL)
    base = tl.program_id(0).to(tl.int64) * BLOCK
    if base + BLOCK <= N:
        unmarked_tile(dy_ptr, mark_ptr, dx_ptr, base, BLOCK, ONE, False, BLOCK)
    else:
        live = (N - base).to(tl.int32)
        unmarked_tile(dy_ptr, mark_ptr, dx_ptr, base, live, ONE, True, BLOCK)


Config = dict[str, Any]


def marked_configs(dtype: str) -> list[Config]:
    """Configurations, best guess first: one 16-byte access a thread, or two."""
    wide = 2 if dtype == "f32" else 1
    return [
        {"BLOCK": block // wide, "num_warps": warps}
        for block, warps in ((2048, 8), (2048, 4), (1024, 4), (4096, 8))
    ]


def marks(count: int) -> int:
    """Bytes of the marks of so many elements."""
    return triton.cdiv(count, BITS.value)


def marked_launcher(
    dtype: str, count: int, adds: bool, config: Config, device: torch.device
) -> Callable[..., bool]:
    """A callable (a, y, mark) -> bool, or (a, b, y, mark) where it `adds`: contiguous tensors of `count` elements at multiples of 16 bytes,
    and `marks(count)` bytes."""
    start = _prepared(relu_fwd_marked, ("a", "b", "y") if adds else ("a", "y"), dtype, count, config, device, ADDS=adds)  # fmt: skip
    return start


def unmarked_launcher(
    dtype: str, count: int, one: bool, config: Config, device: torch.device
) -> Callable[..., bool]:
    """A callable (dy, mark, dx) -> bool over the same; dy has one element where it is `one`."""
    return _prepared(relu_bwd_marked, ("dy", "dx"), dtype, count, config, device, ONE=one)


def _prepared(
    kernel: Any,
    names: tuple[str, ...],
    dtype: str,
    count: int,
    config: Config,
    device: torch.device,
    **known: bool,
) -> Callable[..., bool]:
    dtypes = {**{f"{name}_ptr": dtype for name in names}, "mark_ptr": "u8"}
    return prepare(
        kernel,
        grid=(triton.cdiv(count, config["BLOCK"]), 1, 1),
        pointers={name: dtypes[name] for name in kernel.arg_names if name in dtypes},
        integers={"N": count},
        floats=(),
        constexprs={**known, "BLOCK": config["BLOCK"]},
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
    )
