"""Notices, on a CPU, writes to weights that PyTorch does not count (through `.data` or NumPy): two elements of each are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import numpy
import torch
from torch import Tensor

VERSION = attrgetter("_version")
BITS = {
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


class Samples:
    """Two elements of each tensor, as bits: the largest of its first row, and the one in the middle."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.tensors = [t for t in {id(t): t for t in tensors}.values() if _readable(t)]
        self.look()

    def look(self) -> None:
        """Take the tensors as they are now."""
        self.arrays: list[Any] = []
        self.places: list[int] = []
        for t in self.tensors:
            array = t.detach().view(BITS[t.dtype]).numpy()
            self.arrays += [array, array]
            largest = t.detach()[:1].flatten().abs().argmax() if t.dim() else 0
            self.places += [int(largest), t.numel() // 2]
        self.where = [*map(Tensor.data_ptr, self.tensors)]
        self.values, self.versions = self._values(), [*map(VERSION, self.tensors)]

    def unseen(self) -> list[Tensor]:
        """Those that were written to since they were looked at, with no version more."""
        if [*map(Tensor.data_ptr, self.tensors)] != self.where:
            self.look()  # elsewhere: who keeps what is derived from them sees that
        now = self._values()
        if now == self.values:
            return []
        versions = [*map(VERSION, self.tensors)]
        differ = {i // 2 for i, v in enumerate(now) if v != self.values[i]}
        found = [self.tensors[i] for i in differ if versions[i] == self.versions[i]]
        self.values, self.versions = now, versions
        return found

    def _values(self) -> list[int]:
        return [*map(numpy.ndarray.item, self.arrays, self.places)]


def _readable(t: Tensor) -> bool:
    plain = t.device.type == "cpu" and t.layout == torch.strided and t.dtype in BITS
    return plain and t.numel() > 0 and not t.is_inference()
