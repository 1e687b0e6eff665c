"""linear by the tiled product: bias, residual and activation in the epilogue, the pre-activation stored where backward needs it."""

from __future__ import annotations

import sys
from math import prod

from ...core.activations import SMOOTH
from ...core.key import Key
from ...kernels.gemm import bind
from ...kernels.gemm.bind import Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from . import LINEAR, LINEAR_BACKWARD

# multiply-adds of one product up to which two launches may beat three
FUSED_BACKWARD = 2**24


def describe(key: Key) -> Plan | str:
    """The product behind a linear key."""
    x, weight, bias, residual = key.tensors
    assert x is not None and weight is not None
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    m, n, k, rows, w = found
    other = None
    if residual is not None:
        other = bind.matrix(residual)
        if other is None:
            return "the residual's rows are not evenly spaced"
    keep = key.flag("save") and key.flag("activation") in SMOOTH
    spec = GemmSpec(
        m, n, k, rows, w, Operand(x.dtype, n, 1),
        bias=bias.dtype if bias else None,
        outer="residual" if other else "none",
        residual=other,
        activation=key.flag("activation"),
        z=x.dtype if keep else None,
    )  # fmt: skip
    shape = (*x.shape[:-1], n)
    made = {"y": ("y", shape, x.dtype)} | ({"z": ("z", shape, x.dtype)} if keep else {})
    given = {"x": "x", "w": "weight", "bias": "bias", "residual": "residual"}
    return Plan((Product(spec, given, made),), tuple(made))


def describe_backward(key: Key) -> Plan | str:
    """dx = dz · weight and dweight = dzᵀ · x, with dz = dy · act'(kept) as their prologue and dbias as the latter's row sums."""
    dy, x, weight, kept = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs, activation = key.flag("needs"), key.flag("activation")
    if len(dy.shape) < 1 or 0 in (*dy.shape, *weight.shape):
        return "empty"
    rows, other, saved = bind.matrix(dy), bind.matrix(x), None
    if rows is None or other is None:
        return "rows of dy or x are not evenly spaced"
    if activation != "none" and kept is not None:
        saved = bind.matrix(kept)
        if saved is None:
            return "rows of the kept tensor are not evenly spaced"
    elif activation != "none":
        return "nothing was kept for the activation's gradient"
    if needs[2] == "1" and needs[1] == "0":
        return "a bias gradient without a weight gradient"
    m, (n, k), dtype = prod(dy.shape[:-1]), weight.shape, dy.dtype
    if m * n * k > FUSED_BACKWARD:
        return "at this size the activation's gradient is cheaper as a pass of its own"
    gradient = {"prologue": "gradient", "kind": activation, "saved": saved} if saved else {}
    products, returns = [], ["None"] * 4
    wants_dz = needs[3] == "1" and saved is not None
    if needs[0] == "1" or wants_dz:
        spec = GemmSpec(
            m,
            k,
            n,
            rows,
            Operand(weight.dtype, *weight.stride),
            Operand(dtype, k, 1),
            x_out=dtype if wants_dz else None,
            **gradient,
        )
        made = {"y": ("dx", x.shape, dtype)} | (
            {"x_out": ("dz", dy.shape, dtype)} if wants_dz else {}
        )
        products.append(Product(spec, {"x": "dy", "w": "weight", "saved": "kept"}, made))
        returns[0] = "dx"
    if needs[1] == "1":
        turned = Operand(dtype, rows.columns, rows.rows)
        if saved is not None:
            gradient = gradient | {"saved": Operand(saved.dtype, saved.columns, saved.rows)}
        total = needs[2] == "1"
        spec = GemmSpec(
            n,
            k,
            m,
            turned,
            other,
            Operand(dtype, k, 1),
            row_sum=dtype if total else None,
            transposed=True,
            **gradient,
        )
        made = {"y": ("dw", weight.shape, dtype)} | (
            {"row_sum": ("db", (n,), dtype)} if total else {}
        )
        products.append(Product(spec, {"x": "dy", "w": "x", "saved": "kept"}, made))
        returns[1:3] = ["dw", "db" if total else "None"]
    if needs[3] == "1":
        returns[3] = "dz" if wants_dz else "dy.clone()"
    return Plan(tuple(products), tuple(returns)) if products else "no product is needed"


bind.candidate(LINEAR, "triton.tiled", describe, (sys.modules[__name__],))
bind.candidate(LINEAR_BACKWARD, "triton.tiled", describe_backward, (sys.modules[__name__],))
