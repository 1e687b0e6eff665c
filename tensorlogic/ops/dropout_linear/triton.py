"""dropout_linear by the tiled product: the mask is drawn for each tile of x where it is used, and again in backward."""

from __future__ import annotations

import sys
from math import prod

from ...core.key import Key
from ...kernels.gemm import backward_steps, bind
from ...kernels.gemm.bind import Kernel, Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.reduce import contiguous
from . import DROPOUT_LINEAR, DROPOUT_LINEAR_BACKWARD


def describe(key: Key) -> Plan | str:
    """The product behind a key."""
    x, weight, bias, state = key.tensors
    assert x is not None and weight is not None
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    m, n, k, rows, w = found
    spec = GemmSpec(
        m,
        n,
        k,
        rows,
        w,
        Operand(x.dtype, n, 1),
        prologue="dropout",
        bias=bias.dtype if bias else None,
        seeded=state is None,
    )
    given = {
        "x": "x",
        "w": "weight",
        "bias": "bias",
        "seed": "state",
        "p": "p",
        "seed_value": "seed",
        "offset_value": "offset",
    }
    returns = ("y", "None") if key.flag("save") else ("y",)
    return Plan((Product(spec, given, {"y": ("y", (*x.shape[:-1], n), x.dtype)}),), returns)


def describe_backward(key: Key) -> Plan | str:
    """dx = dropout(dy · weight) in the epilogue; dweightᵀ = dropout(x)ᵀ · dy in the prologue."""
    dy, x, weight, mask, state = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs = key.flag("needs")
    if mask is not None:
        return "forward kept a mask of PyTorch's"
    if 0 in (*dy.shape, *weight.shape):
        return "empty"
    rows, other = bind.matrix(dy), bind.matrix(x)
    if rows is None or other is None:
        return "rows of dy or x are not evenly spaced"
    m, (n, k), dtype = prod(dy.shape[:-1]), weight.shape, dy.dtype
    numbers = {"seed": "state", "p": "p", "seed_value": "seed", "offset_value": "offset"}
    products, returns = list[Product | Kernel](), ["None"] * 3
    if needs[0] == "1":
        spec = GemmSpec(
            m,
            k,
            n,
            rows,
            Operand(dtype, *weight.stride),
            Operand(dtype, k, 1),
            outer="dropout",
            seeded=state is None,
        )
        products.append(
            Product(spec, {"x": "dy", "w": "weight", **numbers}, {"y": ("dx", x.shape, dtype)})
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
            prologue="dropout",
            transposed=True,
            seeded=state is None,
        )
        products.append(
            Product(spec, {"x": "x", "w": "dy", **numbers}, {"y": ("dw", weight.shape, dtype)})
        )
        returns[1] = "dw"
    if needs[2] == "1":
        step, returns[2] = backward_steps.bias_gradient(dy, n)
        products += step
    return Plan(tuple(products), tuple(returns)) if products else "no product is needed"


bind.candidate(DROPOUT_LINEAR, "triton.tiled", describe, (sys.modules[__name__],))
bind.candidate(
    DROPOUT_LINEAR_BACKWARD,
    "triton.tiled",
    describe_backward,
    (backward_steps, contiguous, sys.modules[__name__]),
)
