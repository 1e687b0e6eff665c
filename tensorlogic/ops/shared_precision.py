"""Registers the ways of NVIDIA GPUs with every product under a precision policy."""

from __future__ import annotations

from ..mixed_precision import formats_cuda, precise_op

precise_op.extend(formats_cuda.found(), formats_cuda.__name__)
