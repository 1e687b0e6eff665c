"""Buffers that stand for a call's tensors when it is recorded, and batches filled up to the sizes that are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MOST_LOOKED_AT = 1 << 30  # bytes of inputs: more are not copied to be compared


def plain(tensor: Tensor) -> bool:
    """False for subclasses, whose own state a buffer lacks, and for tensors that no buffer is like."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and not (tensor.is_nested or tensor.is_quantized or tensor.is_meta)
    )


class Unseen:
    """Notices tensors that a call writes to without PyTorch counting a version of them, as kernels of one's own do."""

    def __init__(self, flat: Iterable[Any]) -> None:
        tensors = [(i, v) for i, v in enumerate(flat) if isinstance(v, Tensor) and v.numel()]
        small = sum(t.nbytes for _, t in tensors) <= MOST_LOOKED_AT
        self.before = [(i, t, _version(t), _bytes(t)) for i, t in tensors if small]

    def written(self) -> bool:
        """Whether one is not as it was, by no fault of its version's."""
        return any(not t.is_inference() for _, t in self._written())

    def untold(self) -> set[int]:
        """Which are not as they were and have no versions: those of inference mode."""
        return {i for i, t in self._written() if t.is_inference()}

    def _written(self) -> list[tuple[int, Tensor]]:
        return [
            (i, t)
            for i, t, version, held in self.before
            if _version(t) == version and not torch.equal(_bytes(t), held)
        ]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _bytes(tensor: Tensor) -> Tensor:
    """A copy of what a tensor holds, to the bit, in one row."""
    own = once(tensor.detach()).resolve_conj().resolve_neg()
    return own.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)


def static_like(tensor: Tensor) -> Tensor:
    """A buffer of the same shape, strides and dtype, with the same values; its version tells of writes in inference mode, too."""
    with torch.inference_mode(False):
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
