"""What forward keeps for backward: tensors whose values will be read, and of the others no more than how they look."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SavedMeta:
    """Shape, strides and dtype of a tensor whose values backward does not read: it may be written to or let go of."""

    __slots__ = ("dtype", "shape", "stride")

    def __init__(self, tensor: Tensor) -> None:
        self.shape: tuple[int, ...] = tuple(tensor.shape)
        self.stride: tuple[int, ...] = tensor.stride()
        self.dtype: torch.dtype = tensor.dtype

    def beside(self, dy: Tensor) -> Tensor:
        """A tensor that looks so, its values unset, where dy is: what a backward op takes in its place."""
        return dy.new_empty_strided(self.shape, self.stride, dtype=self.dtype)


Saved = Tensor | SavedMeta | None


def read(tensor: Tensor | None, needed: bool) -> Saved:
    """The tensor where its values are needed, or else how it looks; None of None."""
    return tensor if needed or tensor is None else SavedMeta(tensor)


def from_meta(kept: Sequence[Saved], dy: Tensor) -> list[Tensor | None]:
    """Tensors in the place of looks."""
    return [k.beside(dy) if isinstance(k, SavedMeta) else k for k in kept]


def split(kept: Sequence[Saved]) -> tuple[list[Tensor | None], list[SavedMeta | None]]:
    """The tensors, which autograd keeps, and the looks, each with None in the place of the others."""
    looks = [k if isinstance(k, SavedMeta) else None for k in kept]
    return [None if isinstance(k, SavedMeta) else k for k in kept], looks


def joined(
    tensors: Sequence[Tensor | None], looks: Sequence[SavedMeta | None]
) -> tuple[Saved, ...]:
    """What `split` has parted."""
    return tuple([t if s is None else s for t, s in zip(tensors, looks, strict=True)])
