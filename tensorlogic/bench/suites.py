"""Which cases a run measures: the standard sizes, the quick ones, and what a person selects."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..core.op import OPS
from .cases import CATEGORIES, RECIPES, SQUARE, TRANSFERS, Case
from .terminal.user_error import Problem

K, M = 1 << 10, 1 << 20
LARGEST_SIDE = 32 * K
Sides = tuple[int, ...]
SIZES: dict[str, tuple[Sides, Sides]] = {  # category -> sizes on any device, and those a GPU adds
    "matmul": ((64, 128, 256, 512, 1024), (2048, 4096, 8192)),
    "fusion": ((128, 256, 512, 1024), (2048, 4096, 8192)),
    "flat": ((K, 10 * K, 100 * K, M), (128 * M,)),
    "batch": ((1, 2, 4, 8, 16, 32, 64, 128), (256, 512)),
}
QUICK: dict[str, dict[str, Sides]] = {
    "cpu": {"matmul": (64, 256, 512), "fusion": (128, 512), "flat": (K, M), "batch": (1, 8, 64)},
    "gpu": {"matmul": (128, 1024, 4096), "fusion": (128, 1024, 4096), "flat": (K, M, 128 * M), "batch": (1, 8, 64, 512)},
}  # fmt: skip
DTYPES = ("f16", "bf16", "f32")
SERVED = {"linear_residual_relu": "linear", "requests": "linear"}  # operation -> the op of its keys


@dataclass(frozen=True)
class Selection:
    """What a person asked for; empty tuples mean the standard."""

    device: str
    quick: bool = False
    ops: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known(self.ops, (*CATEGORIES, *RECIPES))
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise Problem(f"dtype is {dtype!r}; one of {', '.join(DTYPES)} is required")


def known(names: Iterable[str], allowed: Iterable[str]) -> None:
    """Problem where a name is no operation or category."""
    allowed = dict.fromkeys(allowed)
    for name in names:
        if name not in allowed:
            raise Problem(
                f"op is {name!r}; one of these operations or categories is required: {', '.join(allowed)}"
            )


def named(names: Sequence[str]) -> frozenset[str]:
    """The ops whose keys operations and categories of the benchmark, functions and ops stand for."""
    known(
        names,
        (*CATEGORIES, *RECIPES, *(n for n, op in OPS.items() if not op.internal or n in names)),
    )
    asked = {r.op for r in RECIPES.values() if not {r.op, r.category}.isdisjoint(names)}
    served = {SERVED.get(op, op) for op in {*names, *asked}}
    return frozenset(served)


def cases(selection: Selection) -> list[Case]:
    """The cases of a selection, in the order of the report."""
    chosen = list(_cases(selection))
    if not chosen:
        raise Problem(
            f"nothing to measure: no size of the selected operations is among {', '.join(map(str, selection.sizes))}"
        )
    return chosen


def _cases(s: Selection) -> Iterator[Case]:
    plain = [r for r in RECIPES.values() if r.category not in ("fusion", "batch")]
    fused = [r for r in RECIPES.values() if r.category == "fusion"]
    for recipe in plain:
        yield from _of(s, recipe.category, recipe.op)
    for detail in TRANSFERS[s.device]:
        if _wanted(s, "transfer", "transfer"):
            for size in _sizes(s, "transfer"):
                dtype = (s.dtypes or ("f16",))[0]
                yield Case("transfer", "transfer", size, dtype, s.device, detail)
    for recipe in fused:
        yield from _of(s, recipe.category, recipe.op)
    yield from _of(s, "batch", "requests")


def _of(s: Selection, category: str, op: str) -> Iterator[Case]:
    if not _wanted(s, category, op):
        return
    for dtype in _dtypes(s, category):
        for size in _sizes(s, category):
            yield Case(category, op, size, dtype, s.device)


def _wanted(s: Selection, category: str, op: str) -> bool:
    return not s.ops or category in s.ops or op in s.ops


def _dtypes(s: Selection, category: str) -> Sequence[str]:
    """Half precision is what this package is for; float32 stands beside it where products are concerned."""
    if s.dtypes:
        return s.dtypes
    if category == "batch":
        return ("f16",)
    return ("f16", "f32") if category == "matmul" or not s.quick else ("f16",)


def _sizes(s: Selection, category: str) -> Sequence[int]:
    if s.sizes:
        return [n for n in s.sizes if category not in (*SQUARE, "batch") or n <= LARGEST_SIDE]
    shape = category if category in SIZES else "flat"
    gpu = s.device != "cpu"
    if s.quick:
        return QUICK["gpu" if gpu else "cpu"][shape]
    common, more = SIZES[shape]
    return (*common, *more) if gpu else common
