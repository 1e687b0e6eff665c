"""linear by one product, Triton's or cuBLASLt's: bias, residual and activation in the epilogue; backward by two, the activation's
gradient in their prologue."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

from ...core.activations import SMOOTH
from ...core.key import Key
from ...kernels.gemm import bind, layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan, Product
from ...kernels.gemm.spec import Operand
from . import LINEAR, LINEAR_BACKWARD


def describe(key: Key, engine: str = "triton") -> Plan | str:
    """One product: bias, residual and activation in its epilogue, the pre-activation stored where backward needs it."""
    x, residual, activation = key.spec("x"), key.spec("residual"), key.flag("activation")
    assert x is not None
    other = None if residual is None else bind.matrix(residual)
    found = layer_plans.layer(
        key,
        engine,
        {"residual": "residual"},
        outer="residual" if other else "none",
        residual=other,
        activation=activation,
        z=x.dtype if key.flag("save") and activation in SMOOTH else None,
    )
    if residual is not None and other is None and isinstance(found, Plan):
        return "the residual's rows are not evenly spaced"
    return found


def describe_backward(key: Key, engine: str = "triton") -> Plan | str:
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
    about: dict[str, Any] = {} if saved is None else {"prologue": "gradient", "kind": activation}
    wants_dz, wants_db = needs[3] == "1" and saved is not None, needs[2] == "1"
    steps = list[Product | Kernel]()
    if needs[0] == "1" or wants_dz:
        dz = dtype if wants_dz else None
        dx = layer_plans.input_gradient(
            engine, "dy", rows, weight, m, x.shape, saved=saved, x_out=dz, **about
        )
        made = {"x_out": ("dz", dy.shape, dtype)} if wants_dz else {}
        steps.append(replace(dx, made={**dx.made, **made}))
    if needs[1] == "1":
        turned = saved and Operand(saved.dtype, saved.columns, saved.rows)
        db = dtype if wants_db else None
        dw = layer_plans.weight_gradient(
            engine, "dy", rows, "x", other, m, n, k, row_sum=db, transposed=True, saved=turned, **about
        )  # fmt: skip
        made = {"row_sum": ("db", (n,), dtype)} if wants_db else {}
        steps.append(replace(dw, made={**dw.made, **made}))
    # dx is made, and returned, wherever dz is
    needs = "1" + needs[1:] if wants_dz else needs
    found = layer_plans.asked(steps, ("dx", "dw", "db", "dz" if wants_dz else "dy.clone()"), needs)
    return layer_plans.small(key, found, "activation's gradient")


gemm_register.add(LINEAR, describe, "triton.tiled")
gemm_register.add(LINEAR_BACKWARD, describe_backward, "triton.tiled")
