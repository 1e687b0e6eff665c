"""How kernels see a reduction: neighbouring dimensions of a contiguous tensor as [outer, reduce, inner]."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...plans import Key
from ..common import wiring


@dataclass(frozen=True)
class Shape:
    """What is reduced: kind, dtype, [outer, reduce, inner], and the output's shape."""

    kind: str
    dtype: str
    outer: int
    reduce: int
    inner: int
    out: tuple[int, ...]
    align: int


def describe(key: Key) -> Shape | str:
    """The reduction behind a key: contiguous data, neighbouring dimensions."""
    (x,) = key.tensors
    assert x is not None
    dims, keep = key.flag("dim"), key.flag("keepdim")
    reason = wiring.one_dtype(key)
    if reason is not None:
        return reason
    if not dims or 0 in x.shape:
        return "nothing to reduce"
    if dims != tuple(range(dims[0], dims[-1] + 1)):
        return "the dimensions are not neighbours"
    if not wiring.is_contiguous(x):
        return "not contiguous"
    first, last = dims[0], dims[-1] + 1
    ones = (1,) * len(dims) if keep else ()
    out = (*x.shape[:first], *ones, *x.shape[last:])
    return Shape(
        key.op,
        x.dtype,
        prod(x.shape[:first]),
        prod(x.shape[first:last]),
        prod(x.shape[last:]),
        out,
        wiring.weakest(key),
    )
