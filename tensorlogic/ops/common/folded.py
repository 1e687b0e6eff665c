"""Keys of the same work in fewer dimensions, by which what was measured on one shape serves others on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod

from ...plans import Key, TensorSpec
from . import wiring

Normal = Callable[[Key], Key]
ALIKE = {"gelu": "gelu_tanh", "silu": "gelu_tanh"}  # activations that cost alike behind a product


def flat_rows(*names: str) -> Normal:
    """The named tensors [..., columns] as [rows, columns] where they are contiguous, and activations that cost alike as one."""

    def normal(key: Key) -> Key:
        if key.device != "cuda":
            return key
        tensors = tuple(
            _rows(t) if name in names and t is not None else t
            for name, t in zip(key.names, key.tensors, strict=True)
        )
        flags = tuple(
            (n, ALIKE.get(v, v) if n == "activation" and isinstance(v, str) else v)
            for n, v in key.flags
        )
        return replace(key, tensors=tensors, flags=flags)

    return normal


def one_line(key: Key) -> Key:
    """Operands of one shape that are contiguous as one dimension; beside a vector that is broadcast, as rows."""
    if key.device != "cuda":
        return key
    most = max((len(t.shape) for t in key.tensors if t is not None), default=0)
    whole = [t for t in key.tensors if t is not None and len(t.shape) == most]
    if not whole or any(t.shape != whole[0].shape or not wiring.is_contiguous(t) for t in whole):
        return key
    others = {
        len(t.shape)
        for t in key.tensors
        if t is not None and len(t.shape) != most and t.shape != ()
    }
    if others - {1}:
        return key
    shape = (prod(whole[0].shape[:-1]), *whole[0].shape[-1:]) if others else (prod(whole[0].shape),)
    tensors = tuple(
        _shaped(t, shape) if t is not None and len(t.shape) == most else t for t in key.tensors
    )
    return replace(key, tensors=tensors)


def last_dimension(key: Key) -> Key:
    """Contiguous tensors whose `dim` is the last one as [rows, columns]."""
    first = key.tensors[0]
    if key.device != "cuda" or first is None or key.flag("dim") != len(first.shape) - 1:
        return key
    if len(first.shape) == 2 or any(t and not wiring.is_contiguous(t) for t in key.tensors):
        return key
    flags = tuple((n, 1 if n == "dim" else v) for n, v in key.flags)
    return replace(key, tensors=tuple(t and _rows(t) for t in key.tensors), flags=flags)


def heads(*names: str) -> Normal:
    """The named tensors [..., rows, columns] as [heads, rows, columns] where there is no mask and they are contiguous."""

    def normal(key: Key) -> Key:
        known = [t for n, t in zip(key.names, key.tensors, strict=True) if n in names and t]
        if key.device != "cuda" or key.spec("mask") is not None:
            return key
        if any(len(t.shape) < 2 or not wiring.is_contiguous(t) for t in known):
            return key
        if len({t.shape[:-2] for t in known}) != 1:
            return key
        tensors = tuple(
            _shaped(t, (prod(t.shape[:-2]), *t.shape[-2:])) if n in names and t is not None else t
            for n, t in zip(key.names, key.tensors, strict=True)
        )
        return replace(key, tensors=tensors)

    return normal


def _rows(t: TensorSpec) -> TensorSpec:
    if len(t.shape) < 3 or not wiring.is_contiguous(t):
        return t
    return _shaped(t, (prod(t.shape[:-1]), t.shape[-1]))


def _shaped(t: TensorSpec, shape: tuple[int, ...]) -> TensorSpec:
    return replace(t, shape=shape, stride=wiring.contiguous(shape))


def reduced(key: Key) -> Key:
    """A contiguous tensor of which neighbouring dimensions are reduced as [outer, reduced, inner], or without inner where that is 1."""
    x, dims = key.tensors[0], key.flag("dim")
    if key.device != "cuda" or x is None or not dims or not wiring.is_contiguous(x):
        return key
    first, last = dims[0], dims[-1] + 1
    if dims != tuple(range(first, last)):
        return key
    shape = tuple(prod(x.shape[a:b]) for a, b in ((0, first), (first, last), (last, None)))
    shape = shape if shape[2] != 1 else shape[:2]
    now = {"dim": (1,), "keepdim": False}
    return replace(
        key, tensors=(_shaped(x, shape),), flags=tuple((n, now.get(n, v)) for n, v in key.flags)
    )


def flat_left(*names: str) -> Normal:
    """As `flat_rows`, where the right operand is one matrix for all batches."""
    rows = flat_rows(*names)

    def normal(key: Key) -> Key:
        b = key.spec("b")
        return rows(key) if b is not None and len(b.shape) == 2 else key

    return normal
