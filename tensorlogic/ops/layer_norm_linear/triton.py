"""layer_norm_linear by the tiled product: rows normalised on their way to the tensor cores, statistics taken by each tile row."""

from __future__ import annotations

import sys

from ...core.key import Key
from ...kernels.gemm import bind
from ...kernels.gemm.bind import Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from . import LAYER_NORM_LINEAR, saves

# multiply-adds up to which every tile may take its rows' statistics itself
FUSED = 2**24
FEW_ROWS = 8  # up to which there are few enough tiles at any size


def describe(key: Key) -> Plan | str:
    """One product whose tiles read their rows twice: once for mean and variance, once for the product."""
    x, gamma, beta, weight, bias = key.tensors
    assert x is not None and weight is not None
    if saves(key):
        return "normalised rows are kept for backward, and its tiles make them in registers"
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    m, n, k, rows, w = found
    if m > FEW_ROWS and m * n * k > FUSED:
        return "at this size the norm is cheaper as a pass of its own"
    spec = GemmSpec(
        m, n, k, rows, w, Operand(x.dtype, n, 1),
        prologue="layer_norm", inline=True,
        gamma=gamma.dtype if gamma else None, beta=beta.dtype if beta else None, bias=bias.dtype if bias else None,
    )  # fmt: skip
    given = {
        "x": "x",
        "w": "weight",
        "gamma": "gamma",
        "beta": "beta",
        "bias": "bias",
        "eps": repr(key.flag("eps")),
    }
    return Plan((Product(spec, given, {"y": ("y", (*x.shape[:-1], n), x.dtype)}),), ("y",))


bind.candidate(LAYER_NORM_LINEAR, "triton.inline", describe, (sys.modules[__name__],))
