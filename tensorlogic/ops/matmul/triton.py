"""matmul by one product, Triton's or cuBLASLt's: any strides, one batch dimension, activation in the epilogue."""

from __future__ import annotations

import itertools
from math import prod

from ...core.activations import SMOOTH
from ...core.key import Key, TensorSpec
from ...kernels.gemm import bind
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from . import MATMUL


def broadcast(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    """The batch dimensions that both stand for; of a shape with fewer, those before are 1."""
    pairs = itertools.zip_longest(reversed(left), reversed(right), fillvalue=1)
    return tuple(n if m == 1 else m for m, n in pairs)[::-1]


def batch_stride(t: TensorSpec, batch: tuple[int, ...]) -> int | None:
    """The stride of a batch dimension that stands for all leading ones; None when they are not evenly spaced."""
    lead = (1,) * (len(batch) - len(t.shape) + 2) + t.shape[:-2]
    strides = (0,) * (len(batch) - len(t.shape) + 2) + t.stride[:-2]
    if prod(lead) == 1:
        return 0
    if lead != batch:
        return None
    dims = [(n, s) for n, s in zip(lead, strides, strict=True) if n != 1]
    even = all(outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(dims))
    return dims[-1][1] if even else None


def operand(t: TensorSpec, batch: int = 0) -> Operand:
    return Operand(t.dtype, t.stride[-2], t.stride[-1], batch)


def operands(lead: tuple[int, ...], *tensors: TensorSpec) -> list[Operand] | str:
    """Batches of matrices, or why they are none."""
    strides = [batch_stride(t, lead) for t in tensors]
    found = [operand(t, s) for t, s in zip(tensors, strides, strict=True) if s is not None]
    return found if len(found) == len(tensors) else "batch dimensions are not evenly spaced"


def describe(key: Key, engine: str = "triton") -> Plan | str:
    """The product behind a matmul key."""
    a, b = key.tensors
    assert a is not None and b is not None
    if len(a.shape) < 2 or len(b.shape) < 2:
        return "a vector"
    (m, k), n = a.shape[-2:], b.shape[-1]
    if 0 in (*a.shape, *b.shape):
        return "empty"
    lead = broadcast(a.shape[:-2], b.shape[:-2])
    left, right = operand(a), operand(b)
    batch = prod(lead)
    if len(b.shape) == 2:
        rows = bind.matrix(a)
        if rows is None:
            return "rows of a are not evenly spaced"
        left, m, batch = rows, prod(a.shape[:-1]), 1
    elif batch > 1:
        found = operands(lead, a, b)
        if isinstance(found, str):
            return found
        left, right = found
    keep = key.flag("save") and key.flag("activation") in SMOOTH
    spec = GemmSpec(
        m, n, k, left, right, Operand(a.dtype, n, 1, m * n if batch > 1 else 0),
        batch=batch, activation=key.flag("activation"), z=a.dtype if keep else None,
    )  # fmt: skip
    shape = (*(lead if len(b.shape) > 2 else a.shape[:-2]), a.shape[-2], n)
    made = {"y": ("y", shape, a.dtype)} | ({"z": ("z", shape, a.dtype)} if keep else {})
    return Plan((Product(spec, {"x": "a", "w": "b"}, made, engine),), tuple(made))


gemm_register.add(MATMUL, describe, "triton.tiled", "triton.padded")
