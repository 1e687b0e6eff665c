"""Notices, on a CPU, writes to weights that PyTorch does not count (through `.data` or NumPy): two elements of each are looked at."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

VERSION, VALUE = attrgetter("_version"), attrgetter("value")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
BITS: dict[int, Any] = {2: ctypes.c_int16, 4: ctypes.c_int32, 8: ctypes.c_int64}


@dataclass(frozen=True)
class Seen:
    """Tensors as they were looked at; other threads find it whole."""

    where: list[int]  # all lay
    tensors: list[Tensor]  # whose memory is there
    cells: list[Any]
    values: list[int]  # that were in them
    versions: list[int]


class Samples:
    """Two elements of each tensor, as bits: the largest of its first row, and the one in the middle."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self.all = [t for t in {id(t): t for t in tensors}.values() if _readable(t)]
        self.look()

    def look(self) -> Seen:
        """Take the tensors as they are now, but for those whose memory is away, as FSDP's is between uses."""
        where = [*map(Tensor.data_ptr, self.all)]
        tensors = [t for t in self.all if t.data_ptr()]
        cells: list[Any] = []
        for t in tensors:
            largest = t.detach()[:1].flatten().abs().argmax() if t.dim() else 0
            cells += [_cell(t, int(largest)), _cell(t, t.numel() // 2)]
        versions = [*map(VERSION, tensors)]
        self.seen = Seen(where, tensors, cells, [*map(VALUE, cells)], versions)
        return self.seen

    def unseen(self) -> list[Tensor]:
        """Those that were written to since they were looked at, with no version more; the same until they are looked at again."""
        seen = self.seen
        if [*map(Tensor.data_ptr, self.all)] != seen.where:
            seen = self.look()  # elsewhere: who keeps what is derived from them sees that
        now = [*map(VALUE, seen.cells)]
        if now == seen.values:
            return []
        versions = [*map(VERSION, seen.tensors)]
        differ = {i // 2 for i, v in enumerate(now) if v != seen.values[i]}
        found = [seen.tensors[i] for i in differ if versions[i] == seen.versions[i]]
        if not found:
            self.seen = replace(seen, values=now, versions=versions)
        return found


def _cell(t: Tensor, index: int) -> Any:
    """The bits of an element, where they lie: an array of NumPy's would keep PyTorch from ever resizing the memory. Read only
    while the tensor's address is what it was."""
    place = 0
    for size, stride in zip(reversed(t.shape), reversed(t.stride()), strict=True):
        index, at = divmod(index, size)
        place += at * stride
    return BITS[t.element_size()].from_address(t.data_ptr() + place * t.element_size())


def _readable(t: Tensor) -> bool:
    plain = t.device.type == "cpu" and t.layout == torch.strided and t.dtype in DTYPES
    return plain and t.numel() > 0 and not t.is_inference()
