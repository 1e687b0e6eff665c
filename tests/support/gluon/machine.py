"""What kernels in Gluon work on: memory, barriers, products and copies under way, and warp groups that take turns."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

STALE = 0.3  # what nobody has written yet; NaN or large, and some kernels would make their rows again, and right


def stale(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Memory that nobody has written; words of 32 bits hold two halves of it."""
    if dtype == torch.int32:
        return torch.full((*shape, 2), STALE, dtype=torch.float16).view(dtype).squeeze(-1)
    return torch.full(shape, STALE, dtype=dtype)


class Kind:
    """An element type, under the names that kernels use."""

    def __init__(self, torch_type: torch.dtype) -> None:
        self.torch = torch_type
        self.primitive_bitwidth = 8 * torch_type.itemsize
        self.element_ty = self

    def __eq__(self, other: object) -> bool:
        return self.torch == (other.torch if isinstance(other, Kind) else other)

    def __hash__(self) -> int:
        return hash(self.torch)


class Pointer:
    """Addresses in one tensor's memory; none may be outside of it."""

    def __init__(self, memory: Tensor, at: Any) -> None:
        self.memory, self.at, self.dtype = memory, at, Kind(memory.dtype)

    @classmethod
    def to(cls, tensor: Tensor) -> Pointer:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        whole = torch.as_strided(tensor, (count,), (1,), 0)
        return cls(whole, torch.tensor(tensor.storage_offset()))

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.memory, self.at + step)

    def seen_as(self, kind: torch.dtype) -> Pointer:
        """The same address, of elements of another kind; the last of memory may be no whole one."""
        size = self.memory.element_size()
        whole = len(self.memory) * size // kind.itemsize * kind.itemsize // size
        return Pointer(self.memory[:whole].view(kind), self.at * size // kind.itemsize)

    def live(self, mask: Any) -> tuple[Tensor, Tensor]:
        """(addresses, mask) of one shape; those that are live lie inside."""
        at, live = torch.broadcast_tensors(self.at, torch.as_tensor(True if mask is None else mask))
        inside = (at >= 0) & (at < len(self.memory))
        assert bool((inside | ~live).all()), "an address outside of its tensor"
        return torch.where(live, at, 0), live


class Matrix:
    """A matrix as bulk copies see it: by tiles, zeros beyond its edges, where nothing is written."""

    def __init__(self, tensor: Tensor, tiled: Any) -> None:
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        (rows, columns), step = tiled.shape, tiled.stride
        last = tensor.storage_offset() + (rows - 1) * step + columns
        assert last <= count, f"a matrix that ends at {last} of {count} elements"
        self.lies = torch.as_strided(tensor, (rows, columns), (step, 1), tensor.storage_offset())
        self.dtype, self.layout = Kind(tensor.dtype), None
        self.block_type = SimpleNamespace(shape=list(tiled.tile))

    def _inside(self, at: Sequence[Any]) -> tuple[slice, slice, int, int]:
        (row, column), (height, width) = (int(i) for i in at), self.block_type.shape
        assert row >= 0 and column >= 0  # noqa: PT018
        rows, columns = self.lies.shape
        high, wide = max(0, min(height, rows - row)), max(0, min(width, columns - column))
        return slice(row, row + high), slice(column, column + wide), high, wide

    def read(self, at: Sequence[Any]) -> Tensor:
        rows, columns, high, wide = self._inside(at)
        tile = torch.zeros(self.block_type.shape, dtype=self.lies.dtype)
        tile[:high, :wide] = self.lies[rows, columns]
        return tile

    def write(self, at: Sequence[Any], tile: Tensor) -> None:
        rows, columns, high, wide = self._inside(at)
        self.lies[rows, columns] = tile[:high, :wide]


class Shared:
    """Shared memory: STALE until something is written."""

    def __init__(self, lies: Tensor) -> None:
        self.lies, self.dtype = lies, Kind(lies.dtype)

    def index(self, i: Any) -> Shared:
        assert 0 <= int(i) < len(self.lies), f"stage {int(i)} of {len(self.lies)}"
        return Shared(self.lies[int(i)])

    def slice(self, first: int, count: int) -> Shared:
        return Shared(self.lies.narrow(0, first, count))

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.lies.permute(*order))

    def load(self, layout: Any) -> Tensor:
        return self.lies.clone()

    def store(self, tile: Tensor) -> None:
        assert tile.dtype == self.lies.dtype
        self.lies.copy_(tile)

    def _reinterpret(self, kind: Kind, shape: Sequence[int], layout: Any) -> Shared:
        flat = self.lies.view(-1).view(kind.torch)
        return Shared(flat[: math.prod(shape)].view(*shape))


class Barrier:
    """Arrivals and bytes that a phase still waits for, and copies that are delivered when it is waited for."""

    def __init__(self) -> None:
        self.count, self.missing, self.bytes, self.phase = 0, 0, 0, 0
        self.coming: list[Callable[[], Any]] = []
        self.landed: list[Callable[[], Any]] = []

    def init(self, count: int) -> None:
        self.count = self.missing = count

    def settle(self) -> None:
        """Begin the next phase where this one waits for nothing more."""
        if not self.missing and not self.bytes:
            self.phase, self.missing = self.phase ^ 1, self.count
            self.landed, self.coming = self.landed + self.coming, []

    def done(self, phase: int) -> bool:
        """Whether the phase of that parity is over; what came with it is there then."""
        assert self.count, "a barrier that was not initialised"
        if self.phase == phase:
            return False
        while self.landed:
            self.landed.pop(0)()
        return True


class Barriers(list[Barrier]):
    def index(self, i: Any) -> Barrier:  # type: ignore[override]
        assert 0 <= int(i) < len(self), f"barrier {int(i)} of {len(self)}"
        return self[int(i)]


class Product:
    """A product under way: of what its operands hold when it is waited for."""

    def __init__(self, x: Any, w: Any, acc: Any) -> None:
        self.x, self.w, self.acc, self.value = x, w, acc, None

    def early(self, *_: Any) -> Any:
        raise AssertionError("a product is used that is under way")

    __add__ = __mul__ = __sub__ = __getitem__ = early

    def finish(self) -> None:
        x, w = (o.lies if isinstance(o, Shared) else o for o in (self.x, self.w))
        assert x.dtype == w.dtype, (x.dtype, w.dtype)
        acc = self.acc.value if isinstance(self.acc, Product) else self.acc
        self.value = acc + x.float() @ w.float()


class Group(threading.local):
    """What a warp group has under way."""

    def __init__(self) -> None:
        self.products: deque[Product] = deque()
        self.stores: deque[Callable[[], None]] = deque()
        self.copies: list[Callable[[], None]] = []
        self.groups: deque[list[Callable[[], None]]] = deque()


class Program:
    """One program: its warp groups take turns, at barriers."""

    def __init__(self, number: int, programs: int, warps: int) -> None:
        self.number, self.programs, self.warps = number, programs, warps
        self.turn, self.alive, self.waiting = threading.Condition(), 1, 0
        self.failed: list[BaseException] = []
        self.group = Group()

    def wait(self, barrier: Barrier, phase: Any) -> None:
        while not barrier.done(int(phase)):
            self.waiting += 1
            if self.waiting == self.alive:
                self.fail(AssertionError("every warp group waits"))
            if not self.failed:
                self.turn.wait()
            if self.failed:
                raise self.failed[0]

    def moved(self) -> None:
        """Something happened that others may wait for: all of them look again."""
        self.waiting = 0
        self.turn.notify_all()

    def fail(self, problem: BaseException) -> None:
        self.failed.append(problem)
        self.moved()

    def specialize(self, functions: Sequence[tuple[Any, tuple[Any, ...]]], *_: Any) -> None:
        """Run functions as warp groups; returns when all have ended."""

        def run(function: Any, args: tuple[Any, ...]) -> None:
            with self.turn:
                try:
                    function(*args)
                    assert not self.group.stores, "it ended with a store under way"
                except BaseException as problem:  # raised again by the caller's thread
                    self.fail(problem)
                finally:
                    self.alive -= 1
                    self.moved()

        threads = [threading.Thread(target=run, args=pair) for pair in functions]
        self.alive = len(threads)
        for thread in threads:
            thread.start()
        self.turn.release()
        for thread in threads:
            thread.join()
        self.turn.acquire()
        if self.failed:
            raise self.failed[0]
