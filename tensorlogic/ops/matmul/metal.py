"""matmul by Metal's products: any strides, one batch dimension, the activation in the epilogue."""

from __future__ import annotations

from ...kernels.metal import register as metal_register
from . import MATMUL
from .triton import describe

metal_register.products(MATMUL, describe)
