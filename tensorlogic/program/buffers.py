"""Buffers that stand for a call's tensors when it is recorded, and batches filled up to the sizes that are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def plain(tensor: Tensor) -> bool:
    """False for subclasses, whose own state a buffer lacks, and for tensors that no buffer is like."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )


def static_like(tensor: Tensor) -> Tensor:
    """A buffer of the same shape, strides and dtype, with the same values."""
    made = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )
    once(made).copy_(once(tensor.detach()))
    return made


def expanded(tensor: Tensor) -> bool:
    """Whether elements of a tensor are the same memory, as an expanded mask's are; nothing can be copied into it as a whole."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def once(tensor: Tensor) -> Tensor:
    """What of an expanded tensor has memory of its own."""
    for dim, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        tensor = tensor.narrow(dim, 0, 1) if n > 1 and s == 0 else tensor
    return tensor


def filled(x: Tensor, dim: int, size: int) -> Tensor:
    """x with zeros appended along `dim`."""
    if x.dim() <= dim:
        return x
    shape = list(x.shape)
    shape[dim] = size
    made = x.new_zeros(shape)
    made.narrow(dim, 0, x.shape[dim]).copy_(x)
    return made


def rows_of(value: Any, dim: int, rows: int, bucket: int) -> Any:
    """The rows that the caller gave."""
    if isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == bucket:
        return value.narrow(dim, 0, rows)
    return value
