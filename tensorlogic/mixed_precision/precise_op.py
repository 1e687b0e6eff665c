"""Ops under a precision policy: the same schema and gradient, with a candidate for every way to compute their products."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.candidate import EAGER, Candidate, Config, Launcher, Outputs
from ..core.key import Key
from ..core.op import Op, key_flags
from . import adaptive as adaptive  # enters itself as a chooser
from . import formats_cpu, number_formats
from .number_formats import WAYS, Way
from .product_sites import eager_us

# (product, *op's arguments) -> outputs in the result's dtype
Composed = Callable[..., Outputs]
_FAMILY: list[tuple[Op, Any, Any, tuple[Any, ...]]] = []
Sizes = Callable[[Key], list[tuple[int, int, int]]]  # M, N, K of every product of a key


def precise(
    op: Op, composed: Composed, sizes: Sizes, measure: Callable[..., Any], module: str
) -> Op:
    """Give `op` its counterpart under precision policies, whose torch.eager is the reference in float64."""
    sources = (sys.modules[module], sys.modules[__name__], number_formats)
    kept = ("reference", "flops", "traffic", "sample", "scalars", "normal", "gradient", "outputs", "internal")  # fmt: skip
    made = Op(**{name: getattr(op, name) for name in kept}, measure=measure, listed=False)
    op.precise = made
    made.add(Candidate(EAGER, bind=_in_f64(op, made, composed), sources=sources, trusted=True))
    for way in formats_cpu.found():
        add(made, way, composed, sizes, (*sources, formats_cpu))
    _FAMILY.append((made, composed, sizes, sources))
    return made


def extend(found: list[Way], module: str) -> None:
    """More ways for every precise op: what a kind of device brings when it is first used."""
    for op, composed, sizes, sources in _FAMILY:
        for way in found:
            add(op, way, composed, sizes, (*sources, sys.modules[module]))


def add(op: Op, way: Way, composed: Composed, sizes: Sizes, sources: tuple[Any, ...]) -> None:
    """One way as a candidate of a precise op."""
    WAYS[way.id] = way
    op.add(
        Candidate(
            way.id, bind=_ranked(op, composed, way), supports=partial(_supports, way), configs=partial(_configs, way),
            available=way.available, sources=(*sources, *way.sources), guess=partial(_guess, way, sizes),
            coarse=partial(number_formats.coarse, way.form), background=True, trusted=True,
        )
    )  # fmt: skip


def _in_f64(
    op: Op, made: Op, composed: Composed
) -> Callable[[Key, Config, torch.device], Launcher]:
    """The reference; of operands in float64 what PyTorch has for them, without anything around it."""

    def bind(key: Key, config: Config, device: torch.device) -> Launcher:
        full = isinstance(key, Key)  # a composition's has flags only
        wide = full and all(t is None or t.dtype == "f64" for t in key.tensors)
        direct = op.direct(key) if wide else None
        if direct is None:
            return made.closer(partial(composed, number_formats.in_f64), *key_flags(key))
        return lambda *dynamic: (direct(*dynamic),)

    return bind


def _ranked(
    op: Op, composed: Composed, way: Way
) -> Callable[[Key, Config, torch.device], Launcher]:
    def bind(key: Key, config: Config, device: torch.device) -> Launcher:
        product = way.product
        if way.unwatched is not None and key.precision != "adaptive":
            product = way.unwatched
        if way.ranks > 1:
            product = partial(product, rank=int(config["rank"]))
        launch = op.closer(partial(composed, number_formats.by_parts(product)), *key_flags(key))
        if way.run is None or key.device != "cuda":
            return launch
        from .guarded_cuda import Quick  # needs Triton, as the ways of GPUs do

        return Quick(op, key, config, device, way.id, launch)

    return bind


def _configs(way: Way, key: Key) -> list[Config]:
    return [{"rank": rank} for rank in range(way.ranks)] if way.ranks > 1 else [{}]


def _supports(way: Way, key: Key) -> str | None:
    if way.form not in number_formats.SERVING.get(key.precision, ()):
        return f"it computes in {way.form}, the policy asks for {key.precision}"
    if way.guarded and key.precision != "adaptive":
        return "it could overflow, and nobody would see"
    if way.matrices and (batched(key) or any(t is not None and 0 in t.shape for t in key.tensors)):
        return "for one product of matrices that are not empty"
    return way.serves(key)


def batched(key: Key) -> bool:
    """Whether the right operand has leading dimensions, so that there is more than one product."""
    return "b" in key.names and len(getattr(key.spec("b"), "shape", ())) > 2


def _guess(way: Way, sizes: Sizes, key: Key) -> float:
    """Expected time over that of float64."""
    dtype = key.tensors[0].dtype if key.tensors[0] is not None else "f32"
    scale = 4 if dtype in ("c32", "c64", "c128") else 1
    shapes = [(m, n, scale * k) for m, n, k in sizes(key)]
    eager = sum(f64_us(key, *s) for s in shapes)
    return sum(way.us(*s, dtype) for s in shapes) / max(eager, 1e-3)


def f64_us(key: Key, m: int, n: int, k: int) -> float:
    """What the product takes in float64, conversions included."""
    if key.device == "cpu":
        return formats_cpu._rate(25e3, 2, 8)(m, n, k, "f64")
    return eager_us(key, 2 * m * n * k)


def as_result(dtype: torch.dtype, *outs: Tensor | None) -> Outputs:
    """The outputs in the result's dtype."""
    return tuple(None if out is None else out.to(dtype) for out in outs)


def as_operand(gradient: Tensor, operand: Tensor) -> Tensor:
    """A gradient in its operand's shape and dtype; of a complex one that of a real operand is the real part."""
    found = gradient.real if gradient.is_complex() and not operand.is_complex() else gradient
    return found.reshape(operand.shape).to(operand.dtype)


def widest(dtype: torch.dtype) -> torch.dtype:
    """At least float32: what passes over halves compute in."""
    if dtype.is_complex:
        return torch.complex64 if dtype == torch.complex32 else dtype
    return dtype if dtype == torch.float64 else torch.float32
