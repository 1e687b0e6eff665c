"""layer_norm_linear by Metal's products: every tile takes its rows' statistics, then normalises elements on their way in."""

from __future__ import annotations

from ...kernels.metal import register as metal_register
from . import LAYER_NORM_LINEAR
from .triton import describe

metal_register.products(LAYER_NORM_LINEAR, describe, "tiled", "simdgroup")
