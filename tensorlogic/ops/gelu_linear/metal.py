"""gelu_linear by Metal's products, the GELU applied to elements of x on their way into a tile."""

from __future__ import annotations

from ...core.key import Key
from ...kernels.gemm import bind
from ...kernels.gemm.bind import Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.metal import register as metal_register
from . import GELU_LINEAR


def describe(key: Key) -> Plan | str:
    """The product behind a key, of any size: where the GELU is cheaper as a pass of its own is for each Mac to measure."""
    x, weight, bias = key.tensors
    assert x is not None and weight is not None
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    m, n, k, rows, w = found
    kind = "gelu_tanh" if key.flag("approximate") == "tanh" else "gelu"
    spec = GemmSpec(
        m, n, k, rows, w, Operand(x.dtype, n, 1),
        prologue="activation", kind=kind, bias=bias.dtype if bias else None,
    )  # fmt: skip
    made = {"y": ("y", (*x.shape[:-1], n), x.dtype)}
    return Plan((Product(spec, {"x": "x", "w": "weight", "bias": "bias"}, made),), ("y",))


metal_register.products(GELU_LINEAR, describe)
