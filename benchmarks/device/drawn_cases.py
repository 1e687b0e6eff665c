"""What cases are drawn from: families of calls that share the kernels they need, and differ in lengths and values."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensorlogic.core.op import Op

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WHOLE = 0.2  # families of contiguous tensors with lengths that whole tiles divide, as bulk copies need them


@dataclass(frozen=True)
class Length:
    """Lengths between two powers of two that the same power of two, up to `most`, divides; `first` is one of them."""

    first: int
    most: int = 16

    def draw(self, rng: random.Random) -> int:
        """One of them; now and then the one that this class was made from, which may be an edge case."""
        if self.first < 2 or rng.random() < 0.2:
            return self.first
        step, end = math.gcd(self.first, self.most), 1 << (self.first - 1).bit_length()
        fit = [n for n in range(step, end + 1, step) if math.gcd(n, self.most) == step]
        return rng.choice([n for n in fit if n > end // 2] or [self.first])


@dataclass(frozen=True)
class Layout:
    """How a tensor lies: contiguous, transposed, with padded rows, unaligned, with steps, or one row repeated."""

    kind: str
    extra: int

    def make(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A random tensor of `shape` that lies so; integers are zeros."""

        def fresh(*size: int) -> Tensor:
            if dtype.is_floating_point:
                return torch.randn(size, device=DEVICE).to(dtype)
            return torch.zeros(size, device=DEVICE, dtype=dtype)

        if not shape or self.kind == "plain" or 0 in shape:
            return fresh(*shape)
        if self.kind == "offset":
            skip = 1 + self.extra % 7
            return fresh(torch.Size(shape).numel() + skip)[skip:].view(*shape)
        if self.kind == "steps":
            return fresh(*shape[:-1], 2 * shape[-1])[..., ::2]
        if self.kind == "padded" or len(shape) < 2:
            wide = shape[-1] + (1, 5, 8, 64)[self.extra % 4]
            return fresh(*shape[:-1], wide)[..., : shape[-1]]
        if self.kind == "transposed":
            return fresh(*shape[:-2], shape[-1], shape[-2]).mT
        return fresh(*shape[:-2], 1, shape[-1]).expand(*shape)


@dataclass
class Family:
    """What FAMILY cases in a row share."""

    op: Op
    template: tuple[Any, ...]
    dtype: torch.dtype
    lengths: dict[int, Length]
    layouts: list[Layout]
    recorded: list[bool]
    elements: int
    built: dict[tuple[str, str], list[Any]] = field(default_factory=dict)
    compiled: set[Any] = field(default_factory=set)

    def arguments(self, rng: random.Random) -> list[Any] | None:
        """The template at other lengths; None where a tensor would be too large."""
        sizes = {n: length.draw(rng) for n, length in self.lengths.items()}
        shapes = [[sizes[n] for n in a.shape] for a in self.template if isinstance(a, Tensor)]
        if any(math.prod(shape) > self.elements for shape in shapes):
            return None
        made: list[Any] = []
        tensors = iter(zip(shapes, self.layouts, self.recorded, strict=True))
        for a in self.template:
            if isinstance(a, Tensor):
                shape, layout, recorded = next(tensors)
                kind = self.dtype if a.is_floating_point() else a.dtype
                a = layout.make(shape, kind)
                if recorded and a.is_floating_point():
                    a.requires_grad_()
            made.append(a)
        return made


def side(rng: random.Random) -> int:
    """A length: small, odd, round, or next to a power of two."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randint(1, 20)
    if kind == 1:
        return rng.randint(1, 700)
    if kind == 2:
        return 8 * rng.randint(1, 128)
    return max(1, 2 ** rng.randint(2, 10) + rng.choice((-1, 0, 0, 1)))


def family(rng: random.Random, ops: Sequence[Op], elements: int, widest: int = 10) -> Family:
    """One of the ops' example cases in a random dtype, with random layouts, gradients and kinds of length; whole tiles may
    make lengths up to 2**widest."""
    (op,) = rng.choices(ops, [len(op.candidates) for op in ops])
    template = rng.choice(list(op.cases()))
    tensors = [a for a in template if isinstance(a, Tensor)]
    kinds = ("plain",) * 5 + ("transposed", "padded", "offset", "steps", "repeated")
    whole = rng.random() < WHOLE
    lengths = {
        n: Length(n)
        if n < 2
        else Length(2 ** rng.randint(5, widest), 128)
        if whole
        else Length(side(rng))
        for t in tensors
        for n in t.shape
    }
    if whole:
        kinds = ("plain",)
    return Family(
        op,
        template,
        rng.choice(DTYPES),
        lengths,
        [Layout(rng.choice(kinds), rng.randrange(28)) for _ in tensors],
        [rng.random() < 0.6 for _ in tensors],
        elements,
    )
