"""Cost models: floating-point operations and least bytes to move, from a key."""

from __future__ import annotations

from math import prod

from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec


def size(spec: TensorSpec | None) -> int:
    """Elements of a tensor; 0 when it is absent."""
    return 0 if spec is None else prod(spec.shape)


def nbytes(spec: TensorSpec | None) -> float:
    """Bytes of a tensor's distinct elements (expanded dimensions count once)."""
    if spec is None:
        return 0.0
    distinct = prod(n for n, s in zip(spec.shape, spec.stride, strict=True) if s != 0)
    return float(distinct * DTYPES[spec.dtype].itemsize)


def inputs(key: Key) -> float:
    """Bytes of all input tensors, each read once."""
    return sum(nbytes(t) for t in key.tensors)


def linear_mnk(key: Key, x: str = "x", weight: str = "weight") -> tuple[int, int, int]:
    """M, N, K of a product of x [..., K] with weight [N, K]."""
    a, w = key.present(x), key.present(weight)
    return prod(a.shape[:-1]), w.shape[0], w.shape[1]


def linear_flops(key: Key) -> float:
    """2·M·N·K."""
    m, n, k = linear_mnk(key)
    return 2.0 * m * n * k


def linear_traffic(key: Key) -> float:
    """Every input once, the output once."""
    m, n, _ = linear_mnk(key)
    return inputs(key) + m * n * DTYPES[key.present("x").dtype].itemsize


def pointwise_traffic(key: Key) -> float:
    """Every input once, the broadcast output once."""
    first = key.tensors[0]
    assert first is not None
    return inputs(key) + max(size(t) for t in key.tensors) * DTYPES[first.dtype].itemsize
