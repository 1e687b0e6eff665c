"""layer_norm_linear by Metal's products: every tile takes its rows' statistics, then normalises elements on their way in."""

from __future__ import annotations

from ...core.key import Key
from ...kernels.gemm import bind
from ...kernels.gemm.bind import Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.metal import register as metal_register
from . import LAYER_NORM_LINEAR


def describe(key: Key) -> Plan | str:
    """The product behind a key, of any size: where the norm is cheaper as a pass of its own is for each Mac to measure."""
    x, gamma, beta, weight, bias = key.tensors
    assert x is not None and weight is not None
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    m, n, k, rows, w = found
    spec = GemmSpec(
        m, n, k, rows, w, Operand(x.dtype, n, 1), prologue="layer_norm", inline=True,
        gamma=gamma.dtype if gamma else None, beta=beta.dtype if beta else None, bias=bias.dtype if bias else None,
    )  # fmt: skip
    vectors = {"gamma": "gamma", "beta": "beta", "bias": "bias"}
    given = {"x": "x", "w": "weight", "eps": repr(key.flag("eps")), **vectors}
    made = {"y": ("y", (*x.shape[:-1], n), x.dtype)}
    return Plan((Product(spec, given, made),), ("y",))


metal_register.products(LAYER_NORM_LINEAR, describe, "tiled", "simdgroup")
