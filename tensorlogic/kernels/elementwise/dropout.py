"""Dropout of contiguous elements in one pass, the mask drawn where it is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.triton_runtime.device_math import dropout, follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def dropout_flat(
    x_ptr, seed_ptr, y_ptr, N, p, seed_value, offset_value, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = x / (1 - p) where Philox(seed, offset, index) keeps, else 0, over N elements, computed in float32.

    Seed and offset are the two numbers, or lie in seed_ptr's int64[2].
    """
    follow(PDL)
    if seed_value is not None:
        seed, offset = seed_value.to(tl.int64), offset_value.to(tl.int64)
    else:
        seed, offset = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < N, 0.0).to(tl.float32)
    y = dropout(x, seed, offset, at, p)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), at < N)


CONFIGS: tuple[dict[str, Any], ...] = (
    {"BLOCK": 1024, "num_warps": 4},
    {"BLOCK": 512, "num_warps": 4},
    {"BLOCK": 2048, "num_warps": 8},
)


def dropout_launcher(
    dtype: str, count: int, seeded: bool, config: dict[str, Any], device: torch.device, align: int
) -> Callable[..., bool]:
    """A callable (x, [state,] y, p, [seed, offset]) -> bool over `count` elements; `seeded`: two numbers, else an int64[2]."""
    return prepare(
        dropout_flat,
        grid=(triton.cdiv(count, config["BLOCK"]), 1, 1),
        pointers={"x_ptr": dtype, **({} if seeded else {"seed_ptr": "i64"}), "y_ptr": dtype},
        integers={"N": count},
        floats=("p",),
        longs=("seed_value", "offset_value") if seeded else (),
        constexprs={"BLOCK": config["BLOCK"]},
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=align,
    )
