"""gelu_linear by Metal's products, the GELU applied to elements of x on their way into a tile; at any size, for each Mac to measure."""

from __future__ import annotations

from ...kernels.metal import register as metal_register
from . import GELU_LINEAR
from .triton import describe

metal_register.products(GELU_LINEAR, describe)
