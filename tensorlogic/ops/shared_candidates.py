"""Registers products of one row with the ops whose forward is one product."""

from __future__ import annotations

from ..kernels.gemm import bind, gemv
from ..system.hardware import triton_missing
from .gelu_linear import GELU_LINEAR
from .gelu_linear import triton as gelu_linear_triton
from .layer_norm_linear import LAYER_NORM_LINEAR
from .layer_norm_linear import triton as layer_norm_linear_triton
from .linear import LINEAR
from .linear import triton as linear_triton
from .linear_batch_norm_relu import LINEAR_BATCH_NORM_RELU
from .linear_batch_norm_relu import triton as linear_batch_norm_relu_triton
from .matmul import MATMUL
from .matmul import triton as matmul_triton

if triton_missing() is None:
    from ..kernels.gemm import gemv_kernel

    for _op, _module in (
        (LINEAR, linear_triton),
        (MATMUL, matmul_triton),
        (GELU_LINEAR, gelu_linear_triton),
        (LAYER_NORM_LINEAR, layer_norm_linear_triton),
        (LINEAR_BATCH_NORM_RELU, linear_batch_norm_relu_triton),
    ):
        bind.candidate(
            _op,
            "triton.one_row",
            gemv.instead(_module.describe),
            (gemv, gemv_kernel, _module),
        )
