"""matmul by Metal's products: any strides, one batch dimension, the activation in the epilogue."""

from __future__ import annotations

from ..common import metal_wiring
from . import MATMUL
from .triton_tiled import describe

metal_wiring.products(MATMUL, describe)
