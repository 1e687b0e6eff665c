"""gelu_linear by an element-wise GELU and a product; backward by two products around one pass for the GELU and its gradient."""

from __future__ import annotations

import sys
from functools import partial
from math import prod
from typing import Any

from ...core.key import Key
from ...kernels import register
from ...kernels.elementwise import elementwise
from ...kernels.gemm import backward_steps, bind, padded
from ...kernels.gemm.bind import Kernel, Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.reduce import contiguous
from . import GELU_LINEAR, GELU_LINEAR_BACKWARD


def _kind(key: Key) -> str:
    return "gelu_tanh" if key.flag("approximate") == "tanh" else "gelu"


def describe(key: Key, engine: str = "cublaslt") -> Plan | str:
    """A GELU pass over contiguous x, then one product."""
    x, weight, bias = key.tensors
    assert x is not None and weight is not None
    reason = register.one_dtype(key)
    rows = backward_steps.flat(x, "x")
    if reason is not None or isinstance(rows, str) or 0 in weight.shape:
        return reason or (rows if isinstance(rows, str) else "weight is empty")
    m, (n, k), dtype = prod(x.shape[:-1]), weight.shape, x.dtype
    w = Operand(dtype, weight.stride[1], weight.stride[0])
    spec = GemmSpec(m, n, k, rows, w, Operand(dtype, n, 1), bias=bias.dtype if bias else None)
    made = {"y": ("y", (*x.shape[:-1], n), dtype)}
    first = backward_steps.pointwise(_kind(key), dtype, ("x",), ("active",), x.shape)
    return Plan(
        (first, Product(spec, {"x": "active", "w": "weight", "bias": "bias"}, made, engine)), ("y",)
    )


def describe_backward(key: Key, engine: str = "cublaslt") -> Plan | str:
    """dx = (dy · weight) · gelu'(x), dweight = dyᵀ · gelu(x) with dbias as its row sums."""
    dy, x, weight = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs, kind = key.flag("needs"), _kind(key)
    reason = register.one_dtype(key)
    found = backward_steps.matrices(("dy", dy), ("x", x), ("weight", weight))
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    if not (register.is_contiguous(x) and register.is_contiguous(dy)):
        return "x or dy is not contiguous"
    (rows, other, _), dtype, (n, k) = found, dy.dtype, weight.shape
    m, steps = prod(dy.shape[:-1]), list[Kernel | Product]()
    # whose epilogue takes either gradient without slowing the product
    fused = engine == "triton"
    if needs[0] == "1" and fused:
        gradient: dict[str, Any] = {"outer": "gradient", "kind": kind, "residual": other}
        steps.append(
            backward_steps.input_gradient(engine, "dy", rows, weight, m, x.shape, **gradient)
        )
    elif needs[0] == "1":
        steps.append(
            backward_steps.input_gradient(engine, "dy", rows, weight, m, x.shape, "dactive")
        )
    if needs[:2] == "11" and not fused:
        steps.append(
            backward_steps.pointwise(
                f"{kind}_both", dtype, ("dactive", "x"), ("dx", "active"), x.shape
            )
        )
    elif needs[1] == "1":
        steps.append(backward_steps.pointwise(kind, dtype, ("x",), ("active",), x.shape))
    elif needs[0] == "1" and not fused:
        steps.append(
            backward_steps.pointwise(f"{kind}_bwd", dtype, ("dactive", "x"), ("dx",), x.shape)
        )
    if needs[1] == "1":
        steps.append(
            backward_steps.weight_gradient(
                engine, "dy", rows, "active", Operand(dtype, k, 1), m, n, k
            )
        )
    if needs[2] == "1":
        steps.append(backward_steps.column_sums("dy", dtype, m, n))
    returns = tuple(
        name if need == "1" else "None"
        for name, need in zip(("dx", "dw", "db"), needs, strict=True)
    )
    return Plan(tuple(steps), returns) if steps else "nothing to compute"


_SOURCES = (elementwise, contiguous, backward_steps, sys.modules[__name__])
bind.candidate(GELU_LINEAR, "cublaslt.after_gelu", describe, _SOURCES)
bind.candidate(GELU_LINEAR, "triton.after_gelu", partial(describe, engine="triton"), _SOURCES)
bind.candidate(GELU_LINEAR_BACKWARD, "cublaslt.products", describe_backward, _SOURCES)
bind.candidate(
    GELU_LINEAR_BACKWARD, "triton.products", partial(describe_backward, engine="triton"), _SOURCES
)
for _engine in ("cublaslt", "triton"):
    for _op, _describe in ((GELU_LINEAR, describe), (GELU_LINEAR_BACKWARD, describe_backward)):
        padded.candidate(_op, f"{_engine}.padded", partial(_describe, engine=_engine), _SOURCES)
