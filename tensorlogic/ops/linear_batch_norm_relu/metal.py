"""linear_batch_norm_relu in evaluation by Metal's products: normalisation, scale, shift and ReLU in the epilogue."""

from __future__ import annotations

from ...kernels.metal import register as metal_register
from . import LINEAR_BATCH_NORM_RELU
from .triton import describe

metal_register.products(LINEAR_BATCH_NORM_RELU, describe)
