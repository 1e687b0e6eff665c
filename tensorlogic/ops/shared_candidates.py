"""Registers products of one row with the ops whose forward is one product."""

from __future__ import annotations

from ..kernels.gemm import bind, gemv
from ..system.hardware import triton_missing
from .gelu_linear import GELU_LINEAR
from .gelu_linear import triton_tiled as gelu_linear
from .layer_norm_linear import LAYER_NORM_LINEAR
from .layer_norm_linear import triton_tiled as layer_norm_linear
from .linear import LINEAR
from .linear import triton_tiled as linear
from .linear_batch_norm_relu import LINEAR_BATCH_NORM_RELU
from .linear_batch_norm_relu import triton_tiled as linear_batch_norm_relu
from .matmul import MATMUL
from .matmul import triton_tiled as matmul

if triton_missing() is None:
    from ..kernels.gemm import gemv_kernel

    for _op, _module in (
        (LINEAR, linear),
        (MATMUL, matmul),
        (GELU_LINEAR, gelu_linear),
        (LAYER_NORM_LINEAR, layer_norm_linear),
        (LINEAR_BATCH_NORM_RELU, linear_batch_norm_relu),
    ):
        bind.candidate(
            _op,
            "triton.one_row",
            gemv.instead(_module.describe),
            (gemv, gemv_kernel, _module),
        )
