"""gelu_linear by the tiled product, the GELU applied to tiles of x on their way to the tensor cores."""

from __future__ import annotations

import sys
from math import prod

from ...core.key import Key
from ...kernels.gemm import backward_steps, bind
from ...kernels.gemm.bind import Kernel, Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.reduce import contiguous
from . import GELU_LINEAR, GELU_LINEAR_BACKWARD

# multiply-adds of one product up to which the GELU may be taken again for every tile
FUSED = 2**24
FEW_ROWS = 16  # up to which there are few enough tiles at any size


def _kind(key: Key) -> str:
    return "gelu_tanh" if key.flag("approximate") == "tanh" else "gelu"


def describe(key: Key) -> Plan | str:
    """The product behind a key."""
    x, weight, bias = key.tensors
    assert x is not None and weight is not None
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    m, n, k, rows, w = found
    if m > FEW_ROWS and m * n * k > FUSED:
        return "at this size the GELU is cheaper as a pass of its own"
    spec = GemmSpec(
        m,
        n,
        k,
        rows,
        w,
        Operand(x.dtype, n, 1),
        prologue="activation",
        kind=_kind(key),
        bias=bias.dtype if bias else None,
    )
    made = {"y": ("y", (*x.shape[:-1], n), x.dtype)}
    return Plan((Product(spec, {"x": "x", "w": "weight", "bias": "bias"}, made),), ("y",))


def describe_backward(key: Key) -> Plan | str:
    """dx = (dy · weight) · gelu'(x) in the epilogue; dweightᵀ = gelu(x)ᵀ · dy with the GELU in the prologue."""
    dy, x, weight = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs = key.flag("needs")
    if 0 in (*dy.shape, *weight.shape):
        return "empty"
    rows, other = bind.matrix(dy), bind.matrix(x)
    if rows is None or other is None:
        return "rows of dy or x are not evenly spaced"
    m, (n, k), dtype = prod(dy.shape[:-1]), weight.shape, dy.dtype
    if m * n * k > FUSED:
        return "at this size the GELU is cheaper as a pass of its own"
    products, returns = list[Product | Kernel](), ["None"] * 3
    if needs[0] == "1":
        spec = GemmSpec(
            m,
            k,
            n,
            rows,
            Operand(dtype, *weight.stride),
            Operand(dtype, k, 1),
            outer="gradient",
            kind=_kind(key),
            residual=other,
        )
        products.append(
            Product(
                spec, {"x": "dy", "w": "weight", "residual": "x"}, {"y": ("dx", x.shape, dtype)}
            )
        )
        returns[0] = "dx"
    if needs[1] == "1":
        turned = Operand(dtype, other.columns, other.rows)
        spec = GemmSpec(
            k,
            n,
            m,
            turned,
            rows,
            Operand(dtype, 1, k),
            prologue="activation",
            kind=_kind(key),
            transposed=True,
        )
        products.append(Product(spec, {"x": "x", "w": "dy"}, {"y": ("dw", weight.shape, dtype)}))
        returns[1] = "dw"
    if needs[2] == "1":
        step, returns[2] = backward_steps.bias_gradient(dy, n)
        products += step
    return Plan(tuple(products), tuple(returns)) if products else "no product is needed"


bind.candidate(GELU_LINEAR, "triton.tiled", describe, (sys.modules[__name__],))
bind.candidate(
    GELU_LINEAR_BACKWARD,
    "triton.tiled",
    describe_backward,
    (backward_steps, contiguous, sys.modules[__name__]),
)
