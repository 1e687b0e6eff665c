"""What a choice depends on (Key), and what was chosen and why (Plan, Evidence)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

SIZES = {"f16": 2, "bf16": 2, "f32": 4, "f64": 8}  # bytes of what lines are made of
HALVES = {"f16": "half", "bf16": "half"}
OTHER_DTYPE = 0.25  # squared distance to a neighbour of the other 16-bit dtype
LAYOUT = 3.0  # doublings that another layout of a tensor counts
UNLIKE = 1.0  # squared distance for each tensor or flag of another kind

Kind = tuple[
    tuple[tuple[str, Any] | None, ...],  # dtype and layout of each tensor
    tuple[str, ...],  # flags
    tuple[tuple[Any, ...] | None, ...],  # orders
    tuple[bool | None, ...],  # whether even
]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a choice may depend on of one tensor."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    align: int = 16  # largest power of two up to 16 that divides the address
    constant: bool = False  # a Parameter or a declared constant

    @property
    def text(self) -> str:
        """`f16[128,64]`, `(strides)` unless contiguous, `@align` below 16, `!` if constant."""
        text = f"{self.dtype}[{','.join(map(str, self.shape))}]"
        if self.stride != _contiguous(self.shape):
            text += f"({','.join(map(str, self.stride))})"
        if self.align != 16:
            text += f"@{self.align}"
        return text + "!" * self.constant

    @property
    def layout(self) -> tuple[Any, ...]:
        """Class of the strides: contiguous, last two dimensions swapped, or which other order."""
        wide = [d for d, n in enumerate(self.shape) if n != 1]
        if all(self.stride[d] == _contiguous(self.shape)[d] for d in wide) or 0 in self.shape:
            return ("contiguous",)
        if len(self.shape) > 1:
            order = [*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2]
            swapped = _contiguous(tuple(self.shape[d] for d in order))
            if all(self.stride[d] == swapped[i] for i, d in enumerate(order) if d in wide):
                return ("transposed",)
        return (*self.order, *map(_divisor, self.stride))

    @property
    def order(self) -> tuple[Any, ...]:
        """In which order the dimensions of another layout lie, and which of them without gaps."""
        ranks = sorted(range(len(self.shape)), key=lambda d: (self.stride[d], d))
        return ("other", *ranks, *(self.stride[d] == 1 for d in ranks))

    @property
    def even(self) -> bool:
        """Whether lines begin at multiples of 16 bytes from each other, as wide and bulk accesses want them."""
        least = 16 // SIZES.get(self.dtype, 16)
        steps = [s for n, s in zip(self.shape, self.stride, strict=True) if n > 1 and s != 1]
        return all(s % least == 0 for s in steps)

    @property
    def divided(self) -> tuple[int, ...]:
        """How far the dimension divides that is read along, of the others only whether they are 0, 1 or more."""
        inner = {"contiguous": 1, "transposed": 2}.get(self.layout[0])
        along = None if inner is None else len(self.shape) - inner
        return tuple(
            _divisor(n) if along is None or d == along else _divisor(n) if n < 2 else 2
            for d, n in enumerate(self.shape)
        )

    def to_json(self) -> dict[str, Any]:
        """Only what the text shows."""
        record: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        if self.stride != _contiguous(self.shape):
            record["stride"] = list(self.stride)
        if self.align != 16:
            record["align"] = self.align
        if self.constant:
            record["constant"] = True
        return record

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> TensorSpec:
        """The inverse of `to_json`."""
        shape = tuple(record["shape"])
        stride = tuple(record["stride"]) if "stride" in record else _contiguous(shape)
        more = record.get("align", 16), record.get("constant", False)
        return cls(record["dtype"], shape, stride, *more)


@dataclass(frozen=True, eq=False)
class Key:
    """Everything a choice may depend on, except the environment; equal when the texts are."""

    op: str
    tensors: tuple[TensorSpec | None, ...]
    names: tuple[str, ...]  # tensor parameter names
    flags: tuple[tuple[str, Any], ...]  # JSON scalars or tuples of them
    device: str  # "cuda", "cpu", "mps"
    direction: str  # "inference" | "forward" | "backward"
    precision: str = "default"
    made: TensorSpec | None = None  # what it makes, for `uneven`; no part of the text
    # what is done, where one op does this and that; no part of the text
    work: tuple[Any, ...] = ()

    @cached_property
    def text(self) -> str:
        """One line: `linear inference x=f16[8,4] weight=f16[2,4]! bias=None act=relu @cuda`."""
        parts = [self.op, self.direction]
        specs = zip(self.names, self.tensors, strict=True)
        parts += [f"{name}={None if spec is None else spec.text}" for name, spec in specs]
        parts += [f"{name}={_flag_text(name, value)}" for name, value in self.flags]
        parts.append(f"@{self.device}")
        if self.precision != "default":
            parts.append(f"precision={self.precision}")
        return " ".join(parts)

    def __eq__(self, other: object) -> bool:
        return self.text == other.text if isinstance(other, Key) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def spec(self, name: str) -> TensorSpec | None:
        """The tensor of that parameter, None when the call has none."""
        return self.tensors[self.names.index(name)]

    def present(self, name: str) -> TensorSpec:
        """The tensor of a parameter that every call of the op has."""
        spec = self.spec(name)
        assert spec is not None, name
        return spec

    def flag(self, name: str) -> Any:
        """The value of that flag; KeyError when the op has none of that name."""
        return dict(self.flags)[name]

    @cached_property
    def form(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the tensors and of the flags: another one is of another version of the op."""
        return self.names, tuple(name for name, _ in self.flags)

    @cached_property
    def neighbor_group(self) -> tuple[Any, ...]:
        """What keys share that learn from each other: on a GPU op, direction and precision; elsewhere all but alignment and sizes."""
        if self.device == "cuda":
            dtype = next((t.dtype for t in self.tensors if t is not None), "")
            computes = HALVES.get(dtype, dtype)
            return (self.op, self.form, computes, self.device, self.direction, self.precision)
        tensors = tuple(
            spec and (spec.dtype, spec.constant, spec.layout, spec.divided) for spec in self.tensors
        )
        return (self.op, tensors, self._flags, self.device, self.direction, self.precision)

    @cached_property
    def _flags(self) -> tuple[str, ...]:
        return tuple(f"{name}={_flag_text(name, value)}" for name, value in self.flags)

    def distance(self, other: Key) -> float:
        """Euclidean, in log2 of the distinct sizes, a quarter of log2 of their divisors by rows and columns, and what differs in kind."""
        sizes: set[tuple[int, int]] = set()
        ends: set[tuple[int, int]] = set()
        for a, b in zip(self.tensors, other.tensors, strict=True):
            if a is None or b is None:
                continue
            mine, theirs = a.shape, b.shape
            if len(mine) != len(theirs):
                most = max(len(mine), len(theirs))
                mine, theirs = _padded(mine, most), _padded(theirs, most)
            sizes.update(zip(mine, theirs, strict=True))
            ends.update(zip(mine[-2:], theirs[-2:], strict=True))
        apart = sum([_doublings(n, m) for n, m in sizes if n != m])
        uneven = sum([_parted(n, m) for n, m in ends if n != m])
        return math.sqrt(apart + uneven / 16 + _differing(self._kind, other._kind)[0])

    def layout_mismatches(self, other: Key) -> int:
        """How many tensors are there in both and laid out otherwise, however wide their gaps."""
        return _differing(self._kind, other._kind)[1]

    def search_distance(self, other: Key) -> float:
        """The distance, LAYOUT for each tensor of another layout or evenness, and 1 for each other part of the work: nearest first."""
        another = sum(a != b for a, b in zip(self.work, other.work, strict=True))
        otherwise = self.layout_mismatches(other) + self.alignment_mismatches(other)
        return self.distance(other) + LAYOUT * otherwise + another

    def alignment_mismatches(self, other: Key) -> int:
        """Tensors (and `made`) that are `even` in one key alone, and 1 where one key alone has an uneven one: fast kernels want 16 bytes."""
        return _differing(self._kind, other._kind)[2]

    @cached_property
    def _kind(self) -> Kind:
        layouts = [None if t is None else t.layout for t in self.tensors]
        pairs = [*zip(self.tensors, layouts, strict=True)]
        forms = tuple(t and (t.dtype, lay) for t, lay in pairs)
        orders = tuple(t and (t.order if lay and lay[0] == "other" else lay) for t, lay in pairs)
        even = tuple(t and t.even for t in (*self.tensors, self.made))
        return _kept((forms, self._flags, orders, even))

    def as_aligned(self, other: Key) -> bool:
        """True when no tensor is less aligned than the same one of `other`."""
        pairs = zip(self.tensors, other.tensors, strict=True)
        return all(a is None or b is None or a.align >= b.align for a, b in pairs)

    def to_json(self) -> dict[str, Any]:
        """Readable fields; the order of tensors and flags is part of the key."""
        specs = zip(self.names, self.tensors, strict=True)
        return {
            "op": self.op,
            "direction": self.direction,
            "device": self.device,
            "precision": self.precision,
            "tensors": {name: None if spec is None else spec.to_json() for name, spec in specs},
            "flags": dict(self.flags),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Key:
        """The inverse of `to_json`."""
        tensors = record["tensors"]
        specs = tuple(None if t is None else TensorSpec.from_json(t) for t in tensors.values())
        flags = tuple((name, _tuples(value)) for name, value in record["flags"].items())
        last = record["device"], record["direction"], record["precision"]
        return cls(record["op"], specs, tuple(tensors), flags, *last)


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """PyTorch's strides of a fresh tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _padded(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (1,) * (most - len(shape)) + shape


def _divisor(n: int) -> int:
    """Largest power of two up to 16 that divides `n`; -1 for 1 (a broadcast dimension), 0 for 0."""
    return -1 if n == 1 else min(n & -n, 16)


@lru_cache(4096)
def _kept(kind: Kind) -> Kind:
    """The first of those that are equal, which are soon compared."""
    return kind


@lru_cache(65_536)
def _differing(mine: Kind, theirs: Kind) -> tuple[float, int, int]:
    """The squared distance by dtypes, layouts, presence and flags; tensors of another layout; tensors of another evenness."""
    (forms, flags, orders, even), (its_forms, its_flags, its_orders, its_even) = mine, theirs
    unlike, pairs = 0.0, [*zip(forms, its_forms, strict=True)]
    for a, b in pairs:
        if a is None or b is None:
            unlike += UNLIKE * (a is not b)
            continue
        akin = HALVES.get(a[0], a[0]) == HALVES.get(b[0], b[0])
        unlike += UNLIKE * (a[1] != b[1] or not akin)
    unlike += OTHER_DTYPE * any(a and b and a[0] != b[0] for a, b in pairs)
    unlike += UNLIKE * sum(a != b for a, b in zip(flags, its_flags, strict=True))
    laid = sum(1 for a, b in zip(orders, its_orders, strict=True) if a and b and a != b)
    parted = [*zip(even, its_even, strict=True)]
    uneven = sum(a is not None and b is not None and a != b for a, b in parted)
    return unlike, laid, uneven + ((False in even) != (False in its_even))


@lru_cache(65_536)
def _doublings(n: int, m: int) -> float:
    """From one size to another, squared."""
    return math.log2(max(n, 1) / max(m, 1)) ** 2


@lru_cache(65_536)
def _parted(n: int, m: int) -> float:
    """The same of how far they divide, which is nothing of 0 and 1."""
    return _doublings(abs(_divisor(n)), abs(_divisor(m)))


def _flag_text(name: str, value: Any) -> str:
    """Readable, and different for different values: words stand bare, other strings quoted."""
    if isinstance(value, str):
        bare = value.isidentifier() and value not in ("None", "True", "False", "nan", "inf")
        return value if bare else json.dumps(value)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(_flag_text(name, item) for item in value)})"
    raise TypeError(
        f"flag {name!r} of a key is {value!r}; "
        "it must be None, a bool, a number, a string or a tuple of these"
    )


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _sorted(record: Mapping[str, Any]) -> dict[str, Any]:
    return dict(sorted(record.items()))
