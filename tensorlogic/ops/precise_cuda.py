"""Registers the ways of NVIDIA GPUs with every product under a precision policy."""

from __future__ import annotations

from .common import precise, ways_bytes, ways_cuda

precise.extend(ways_cuda.found(), ways_cuda.__name__)
precise.extend(ways_bytes.found(), ways_bytes.__name__)
