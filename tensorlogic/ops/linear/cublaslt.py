"""linear by cuBLASLt: residual as C, bias and activation in the epilogue; backward by an element-wise pass and two products."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from math import prod

from ...core.key import Key
from ...kernels import register
from ...kernels.elementwise import column_passes, elementwise
from ...kernels.gemm import backward_steps, bind, padded
from ...kernels.gemm.bind import Kernel, Plan, Product
from ...kernels.reduce import contiguous
from . import LINEAR, LINEAR_BACKWARD, triton


def describe(key: Key) -> Plan | str:
    """The tiled candidate's product by the other engine."""
    found = triton.describe(key)
    if isinstance(found, str):
        return found
    return replace(
        found,
        products=tuple(
            replace(p, engine="cublaslt") for p in found.products if isinstance(p, Product)
        ),
    )


def describe_backward(key: Key, engine: str = "cublaslt") -> Plan | str:
    """dz = dy · act'(kept), dx = dz · weight, dweight = dzᵀ · x with dbias as its row sums."""
    dy, x, weight, kept = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs, activation = key.flag("needs"), key.flag("activation")
    reason = register.one_dtype(key)
    if reason is not None:
        return reason
    found = backward_steps.matrices(("dy", dy), ("x", x), ("weight", weight))
    if isinstance(found, str):
        return found
    (rows, other, _), dtype, (n, k) = found, dy.dtype, weight.shape
    m, dz, steps = prod(dy.shape[:-1]), "dy", list[Kernel | Product]()
    if not register.is_contiguous(dy) and (activation != "none" or needs[2] == "1"):
        return "dy is not contiguous"
    if activation != "none":
        if kept is None or not register.is_contiguous(kept):
            return "the kept tensor is not contiguous"
        dz, rows = "dz", replace(rows, rows=n, columns=1)
        if needs[2] == "1":
            steps.append(backward_steps.gradient_with_sums(f"{activation}_bwd", dtype, dy.shape))
        else:
            steps.append(
                backward_steps.pointwise(
                    f"{activation}_bwd", dtype, ("dy", "kept"), ("dz",), dy.shape
                )
            )
    elif needs[2] == "1":
        steps.append(backward_steps.column_sums("dy", dtype, m, n))
    if needs[0] == "1":
        steps.append(backward_steps.input_gradient(engine, dz, rows, weight, m, x.shape))
    if needs[1] == "1":
        steps.append(backward_steps.weight_gradient(engine, dz, rows, "x", other, m, n, k))
    names = ("dx", "dw", "db", "dz" if dz == "dz" else "dy.clone()")
    returns = tuple(
        name if need == "1" else "None" for name, need in zip(names, needs, strict=True)
    )
    return Plan(tuple(steps), returns) if steps else "nothing to compute"


_SOURCES = (
    column_passes,
    elementwise,
    contiguous,
    backward_steps,
    triton,
    sys.modules[__name__],
)
bind.candidate(LINEAR, "cublaslt.epilogue", describe, _SOURCES)
bind.candidate(LINEAR_BACKWARD, "cublaslt.products", describe_backward, _SOURCES)
bind.candidate(
    LINEAR_BACKWARD, "triton.products", partial(describe_backward, engine="triton"), _SOURCES
)
padded.candidate(LINEAR, "cublaslt.padded", describe, _SOURCES)
padded.candidate(LINEAR, "triton.padded", triton.describe, _SOURCES)
for _engine in ("cublaslt", "triton"):
    _described = partial(describe_backward, engine=_engine)
    padded.candidate(LINEAR_BACKWARD, f"{_engine}.padded", _described, _SOURCES)
