"""Registers products of one row with the ops whose forward is one product: linear, matmul, GELU or batch norm around it."""

from __future__ import annotations

from .common import gemm_lanes, gemm_wiring
from .gelu_linear import GELU_LINEAR
from .gelu_linear import triton_tiled as gelu_linear
from .linear import LINEAR
from .linear import triton_tiled as linear
from .linear_batch_norm_relu import LINEAR_BATCH_NORM_RELU
from .linear_batch_norm_relu import triton_tiled as linear_batch_norm_relu
from .matmul import MATMUL
from .matmul import triton_tiled as matmul

for _op, _module in (
    (LINEAR, linear),
    (MATMUL, matmul),
    (GELU_LINEAR, gelu_linear),
    (LINEAR_BATCH_NORM_RELU, linear_batch_norm_relu),
):
    gemm_wiring.candidate(
        _op, "triton.lanes", gemm_lanes.one_row(_module.describe), (gemm_lanes, _module)
    )
