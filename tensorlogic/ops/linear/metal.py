"""linear by Metal's products: bias, residual and activation in the epilogue, the activation's gradient in backward's prologue."""

from __future__ import annotations

from ...kernels.metal import register as metal_register
from . import LINEAR, LINEAR_BACKWARD
from .triton import describe, describe_backward

metal_register.products(LINEAR, describe)
metal_register.products(LINEAR_BACKWARD, describe_backward, "tiled", "simdgroup")
