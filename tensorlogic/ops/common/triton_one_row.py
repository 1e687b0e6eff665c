"""Products of one row by programs that stream their share of the weights through shared memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.ops.common.gemm import GemmSpec
from tensorlogic.ops.common.triton_launch import prepare
from tensorlogic.ops.common.triton_math import activate, follow


@triton.jit
def product_row_streamed(
    x_ptr, w_ptr, bias_ptr, residual_ptr, y_ptr, N, K, SHARE, stride_wn, stride_rn,
    ACTIVATION: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[n] = act(sum over k of x[k] w[n, k] + bias[n] + residual[n]), K together in memory; float32, the same bits every run.

    A program takes SHARE columns, a multiple of BLOCK_N, and has the tiles of STAGES - 1 steps on their way: as many programs as fit
    share all columns evenly, where tiles of columns come in rounds whose last is not full (1x5120x5120: 2.4 paid as 3).
    """
    follow(PDL)
    first = tl.program_id(0) * SHARE
    last = tl.minimum(first + SHARE, N)
    steps = tl.cdiv(K, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    for i in tl.range(0, tl.cdiv(last - first, BLOCK_N) * steps, num_stages=STAGES):
        n = first + i // steps * BLOCK_N + tl.arange(0, BLOCK_N)
        k = i % steps * BLOCK_K + tl.arange(0, BLOCK_K)
        at = (n.to(tl.int64) * stride_wn)[:, None] + k[None, :]
        w = tl.load(w_ptr + at, mask=(n < last)[:, None] & (k < K)[None, :], other=0.0)
        x = tl.load(x_ptr + k, mask=k < K, other=0.0)
        acc += w.to(tl.float32) * x.to(tl.float32)[None, :]
        if i % steps == steps - 1:
            y = tl.sum(acc, 1)
            if bias_ptr is not None:
                y += tl.load(bias_ptr + n, mask=n < last, other=0.0).to(tl.float32)
            if residual_ptr is not None:
                y += tl.load(residual_ptr + n * stride_rn, mask=n < last, other=0.0).to(tl.float32)
            y = activate(y, ACTIVATION)
            tl.store(y_ptr + n, y.to(y_ptr.dtype.element_ty), mask=n < last)
            acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)


def streamed_refusal(spec: GemmSpec) -> str | None:
    """None, or why the product is no plain one of one row with a bias, a residual and an activation at most."""
    size = 4 if spec.x.dtype == "f32" else 2
    if spec.prologue != "none" or spec.outer not in ("none", "residual"):
        return "a product without a prologue, whose epilogue is bias, residual and activation, is required"
    if any((spec.mean, spec.var, spec.scale, spec.shift, spec.z, spec.x_out, spec.row_sum)):
        return "a product with one output and no columnwise factors is required"
    if spec.k * size % 16 or spec.w.columns * size % 16 or spec.align < 16 or spec.k < LEAST:
        return f"K of {LEAST} or more and rows of weights in whole groups of 16 bytes are required"
    return None


LEAST = 512  # of K


def streamed_configs(size: int) -> list[dict[str, Any]]:
    """Configurations, best guess first: columns and K of a step, steps on their way, programs of a multiprocessor."""
    names = ("BLOCK_N", "BLOCK_K", "STAGES", "PER", "num_warps")
    shapes = ((4, 1024, 5, 4, 4), (4, 1024, 8, 2, 4), (2, 2048, 4, 4, 4))
    return [dict(zip(names, (n, k * 2 // size, *rest), strict=True)) for n, k, *rest in shapes]


def streamed_launcher(
    spec: GemmSpec, config: dict[str, Any], device: torch.device, cores: int
) -> Callable[..., bool]:
    """A callable (x, w[, bias][, residual], y) -> bool."""
    block_n = config["BLOCK_N"]
    share = math.ceil(math.ceil(spec.n / (cores * config["PER"])) / block_n) * block_n
    pointers = {
        "x_ptr": spec.x.dtype,
        "w_ptr": spec.w.dtype,
        "bias_ptr": spec.bias,
        "residual_ptr": spec.residual.dtype if spec.residual else None,
        "y_ptr": spec.y.dtype,
    }
    stride = {"stride_rn": spec.residual.columns} if spec.residual else {}
    return prepare(
        product_row_streamed,
        grid=(math.ceil(spec.n / share), 1, 1),
        pointers={name: dtype for name, dtype in pointers.items() if dtype is not None},
        integers={"N": spec.n, "K": spec.k, "SHARE": share, "stride_wn": spec.w.columns, **stride},
        floats=(),
        constexprs={
            "ACTIVATION": spec.activation,
            **{name: config[name] for name in ("BLOCK_N", "BLOCK_K", "STAGES")},
        },
        num_warps=config["num_warps"],
        num_stages=1,
        device=device,
        align=spec.align,
    )
