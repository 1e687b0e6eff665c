"""Tensors and graphs in a wider dtype, to compare against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


FAR = {torch.float16: 0.05, torch.bfloat16: 0.05}  # relative; 1e-3 for other dtypes


def wide_dtype(tensors: Sequence[Any]) -> torch.dtype:
    """float64; float32 on Apple GPUs, which have no wider one, and where everything is half precision on a CPU, which
    float64 would hold up for nothing."""
    floats = [t for t in tensors if isinstance(t, Tensor) and t.is_floating_point()]
    if any(t.device.type == "mps" for t in floats):
        return torch.float32
    half = all(
        t.dtype in (torch.float16, torch.bfloat16) and t.device.type == "cpu" for t in floats
    )
    return torch.float32 if floats and half else torch.float64


def widen(value: Any, dtype: torch.dtype) -> Any:
    """Floating tensors and dtypes as the wider one, everything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().to(dtype, copy=True) if value.dtype in FLOATS else value.clone()
    if isinstance(value, torch.dtype):
        return dtype if value in FLOATS else value
    if isinstance(value, (tuple, list)):
        return type(value)(widen(v, dtype) for v in value)
    return value


def _wide(
    ours: Sequence[Tensor], theirs: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, float]]:
    for a, b in zip(ours, theirs, strict=True):
        dtype = wide_dtype([a])
        pair = [torch.nan_to_num(t.detach().to(dtype), 0.0, 1.0, -1.0) for t in (a, b)]
        yield pair[0], pair[1], FAR.get(a.dtype, 1e-3)
