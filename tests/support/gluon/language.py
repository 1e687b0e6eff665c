"""What kernels call `gl`, `tl`, `tma`, `async_copy` and `mbarrier`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .machine import Barrier, Barriers, Kind, Matrix, Pointer, Product, Program, Shared, stale

KINDS = {
    "float16": Kind(torch.float16), "bfloat16": Kind(torch.bfloat16), "float32": Kind(torch.float32), "float64": Kind(torch.float64),
    "int16": Kind(torch.int16), "int32": Kind(torch.int32), "int64": Kind(torch.int64),
}  # fmt: skip


def scalars(values: Any) -> Any:
    """Python's numbers as tensors, which know `to`."""
    return torch.as_tensor(values) if isinstance(values, (bool, int)) else values


def converted(value: Any, kind: Any, bitcast: bool = False) -> Any:
    """`value.to(kind)`."""
    if isinstance(value, Product):
        value.early()
    into = kind.torch if isinstance(kind, Kind) else kind
    if isinstance(value, Pointer):
        return value.seen_as(into)
    value = scalars(value) if not isinstance(value, float) else torch.tensor(value)
    return value.view(into) if bitcast else value.to(into)


def folded(t: Tensor, axis: int, combine: Callable[[Any, Any], Any]) -> Tensor:
    parts = list(t.unbind(axis))
    while len(parts) > 1:
        pairs = list(itertools.zip_longest(parts[::2], parts[1::2]))
        parts = [a if b is None else combine(a, b) for a, b in pairs]
    return parts[0]


class Language:
    """What kernels call `gl` and `tl`: operations on tiles; names that only say where numbers lie mean nothing here."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.__dict__ |= KINDS
        for name in ("exp", "exp2", "log", "log2", "abs", "rsqrt", "erf"):
            setattr(self, name, getattr(torch, name))

    def __getattr__(self, name: str) -> Any:
        if name.endswith("Layout") or name == "PropagateNan":
            return Anything()
        raise AttributeError(f"the stand-in has no {name}")

    def constexpr(self, value: Any) -> Any:
        return value

    def pointer_type(self, kind: Kind) -> Kind:
        return kind

    def debug_barrier(self) -> None:
        """Threads take turns here anyway."""

    def program_id(self, axis: int) -> Tensor:
        return torch.tensor(self.program.number)

    def num_programs(self, axis: int) -> Tensor:
        return torch.tensor(self.program.programs)

    def num_warps(self) -> int:
        return self.program.warps

    def cdiv(self, a: Any, b: Any) -> Any:
        return (a + b - 1) // b

    def arange(self, first: int, last: int, layout: Any = None) -> Tensor:
        return torch.arange(first, last)

    def zeros(self, shape: Sequence[int], kind: Kind, layout: Any = None) -> Tensor:
        return torch.zeros(shape, dtype=kind.torch)

    def full(self, shape: Sequence[int], value: float, kind: Kind, layout: Any = None) -> Tensor:
        return torch.full(shape, value, dtype=kind.torch)

    def where(self, condition: Any, a: Any, b: Any) -> Tensor:
        return torch.where(torch.as_tensor(condition), a, b)

    def minimum(self, a: Any, b: Any) -> Tensor:
        return torch.minimum(torch.as_tensor(a), torch.as_tensor(b))

    def maximum(self, a: Any, b: Any, propagate_nan: Any = None) -> Tensor:
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        return torch.maximum(a, b) if propagate_nan is not None else torch.fmax(a, b)

    def fma(self, x: Tensor, y: float, z: Tensor) -> Tensor:
        """Rounded once, y to float32 first."""
        return (x.double() * torch.tensor(y, dtype=torch.float32) + z).float()

    def clamp(self, x: Tensor, least: float, most: float, propagate_nan: Any) -> Tensor:
        return x.clamp(least, most)

    def max(self, t: Tensor, axis: int) -> Tensor:
        return folded(t, axis, torch.fmax if t.is_floating_point() else torch.maximum)

    def min(self, t: Tensor, axis: int) -> Tensor:
        return folded(t, axis, torch.fmin if t.is_floating_point() else torch.minimum)

    def sum(self, t: Tensor, axis: int) -> Tensor:
        return t.sum(axis)

    def reduce(self, t: Tensor, axis: int, combine: Callable[[Any, Any], Any]) -> Tensor:
        return folded(t, axis, combine)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = x.unbind(-1)
        return first, second

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.stack([a, b], -1)

    def convert_layout(self, t: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
        return t

    def multiple_of(self, value: Any, by: int) -> Any:
        assert bool((torch.as_tensor(value) % by == 0).all())
        return value

    def static_assert(self, condition: bool) -> None:
        assert condition

    def static_range(self, *bounds: int) -> range:
        return range(*(int(b) for b in bounds))

    def load(self, pointer: Pointer, mask: Any = None, other: float = 0.0, **_: Any) -> Tensor:
        at, live = pointer.live(mask)
        return torch.where(
            live, pointer.memory[at], torch.as_tensor(other).to(pointer.memory.dtype)
        )

    def store(self, pointer: Pointer, value: Tensor, mask: Any = None, **_: Any) -> None:
        at, live = pointer.live(mask)
        assert value.dtype == pointer.memory.dtype
        pointer.memory[at[live]] = value.expand(live.shape)[live]

    def allocate_shared_memory(self, kind: Kind, shape: Sequence[int], layout: Any) -> Any:
        if kind == torch.int64:
            barriers = Barriers(Barrier() for _ in range(shape[0]))
            return barriers if len(shape) > 1 else barriers[0]
        return Shared(stale(shape, kind.torch))

    def warp_specialize(self, functions: Any, *about: Any) -> None:
        self.program.specialize(functions, *about)


class Anything:
    """Whatever is asked of it, again."""

    def __getattr__(self, name: str) -> Anything:
        return self

    def __call__(self, *args: Any, **keywords: Any) -> Anything:
        return self


class Copies:
    """Bulk copies (`tma`), and those by threads (`async_copy`)."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def async_copy_global_to_shared(self, *args: Any, **_: Any) -> None:
        if isinstance(args[0], Matrix):
            matrix, at, barrier, there = args
            tile = matrix.read(at)
            barrier.bytes -= tile.numel() * tile.element_size()
            barrier.coming.append(lambda: there.lies.copy_(tile))
        else:
            there, pointer = args
            at, _ = pointer.live(None)
            self.program.group.copies.append(lambda: there.lies.copy_(pointer.memory[at]))
        there.lies.copy_(stale(there.lies.shape, there.lies.dtype))
        if isinstance(args[0], Matrix):
            barrier.settle()
            self.program.moved()

    def async_copy_shared_to_global(self, matrix: Matrix, at: Sequence[Any], there: Shared) -> None:
        where = [int(i) for i in at]
        self.program.group.stores.append(lambda: matrix.write(where, there.lies))

    def store_wait(self, left: int) -> None:
        stores = self.program.group.stores
        while len(stores) > left:
            stores.popleft()()

    def commit_group(self) -> None:
        group = self.program.group
        group.groups.append(group.copies)
        group.copies = []

    def wait_group(self, left: int) -> None:
        while len(self.program.group.groups) > left:
            for deliver in self.program.group.groups.popleft():
                deliver()


class Mbarrier:
    """Operations on barriers."""

    MBarrierLayout = Anything()

    def __init__(self, program: Program) -> None:
        self.program = program

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.init(count)

    def expect(self, barrier: Barrier, nbytes: int) -> None:
        barrier.bytes += int(nbytes)
        self.arrive(barrier)

    def arrive(self, barrier: Barrier, count: int = 1, pred: Any = True) -> None:
        if bool(pred):
            assert barrier.missing >= count, "more arrivals than a phase waits for"
            barrier.missing -= count
            barrier.settle()
            self.program.moved()

    def wait(self, barrier: Barrier, phase: Any) -> None:
        self.program.wait(barrier, phase)
