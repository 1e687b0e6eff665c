"""gelu_linear by an element-wise GELU and cuBLASLt's product; backward with tanh GELU's gradient in the product's epilogue."""

from __future__ import annotations

import sys
from functools import partial
from math import prod

from ...plans import Key
from ..common import gemm_steps, gemm_wiring, triton_elementwise, wiring
from ..common.gemm import GemmSpec, Operand
from ..common.gemm_wiring import Kernel, Plan, Product
from . import GELU_LINEAR, GELU_LINEAR_BACKWARD


def _kind(key: Key) -> str:
    return "gelu_tanh" if key.flag("approximate") == "tanh" else "gelu"


def describe(key: Key) -> Plan | str:
    """A GELU pass over contiguous x, then one product."""
    x, weight, bias = key.tensors
    assert x is not None and weight is not None
    reason = wiring.one_dtype(key)
    rows = gemm_steps.flat(x, "x")
    if reason is not None or isinstance(rows, str) or 0 in weight.shape:
        return reason or (rows if isinstance(rows, str) else "weight is empty")
    m, (n, k), dtype = prod(x.shape[:-1]), weight.shape, x.dtype
    w = Operand(dtype, weight.stride[1], weight.stride[0])
    spec = GemmSpec(m, n, k, rows, w, Operand(dtype, n, 1), bias=bias.dtype if bias else None)
    made = {"y": ("y", (*x.shape[:-1], n), dtype)}
    first = gemm_steps.pointwise(_kind(key), dtype, ("x",), "active", x.shape)
    return Plan((first, Product(spec, {"x": "active", "w": "weight", "bias": "bias"}, made, "cublaslt")), ("y",))


def describe_backward(key: Key, engine: str = "cublaslt") -> Plan | str:
    """dx = (dy · weight) · gelu'(x), dweight = dyᵀ · gelu(x) with dbias as its row sums."""
    dy, x, weight = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs, kind = key.flag("needs"), _kind(key)
    reason = wiring.one_dtype(key)
    found = gemm_steps.matrices(("dy", dy), ("x", x), ("weight", weight))
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    if not wiring.is_contiguous(x):
        return "x is not contiguous"
    (rows, other, _), dtype, (n, k) = found, dy.dtype, weight.shape
    m, steps, returns = prod(dy.shape[:-1]), list[Kernel | Product](), ["None"] * 3
    if needs[0] == "1":
        if engine == "triton" or kind == "gelu_tanh":
            gradient = {"outer": "gradient", "kind": kind, "residual": other}
            steps.append(gemm_steps.input_gradient(engine, "dy", rows, weight, m, x.shape, **gradient))
        else:
            steps.append(gemm_steps.input_gradient(engine, "dy", rows, weight, m, x.shape, "dactive"))
            steps.append(gemm_steps.pointwise(f"{kind}_bwd", dtype, ("dactive", "x"), "dx", x.shape))
        returns[0] = "dx"
    if needs[1] == "1":
        steps.append(gemm_steps.pointwise(kind, dtype, ("x",), "active", x.shape))
        steps.append(gemm_steps.weight_gradient(engine, "dy", rows, "active", Operand(dtype, k, 1), m, n, k, needs[2] == "1"))
        returns[1:3] = ["dw", "db" if needs[2] == "1" else "None"]
    elif needs[2] == "1":
        returns[2] = f"dy.reshape(-1, {n}).sum(0)"
    return Plan(tuple(steps), tuple(returns)) if steps else "nothing to compute"


_SOURCES = (triton_elementwise, gemm_steps, sys.modules[__name__])
gemm_wiring.candidate(GELU_LINEAR, "cublaslt.after_gelu", describe, _SOURCES)
gemm_wiring.candidate(GELU_LINEAR_BACKWARD, "cublaslt.products", describe_backward, _SOURCES)
gemm_wiring.candidate(GELU_LINEAR_BACKWARD, "triton.products", partial(describe_backward, engine="triton"), _SOURCES)
