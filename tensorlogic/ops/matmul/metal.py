"""matmul by Metal's products: any strides, one batch dimension, the activation in the epilogue."""

from __future__ import annotations

from ...kernels.metal import register as metal_register
from . import MATMUL
from .triton_tiled import describe

metal_register.products(MATMUL, describe)
