"""linear_batch_norm_relu in evaluation by the tiled product: normalisation, scale, shift and ReLU in the epilogue."""

from __future__ import annotations

import sys

from ...core.key import Key
from ...kernels.gemm import bind
from ...kernels.gemm.bind import Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from . import LINEAR_BATCH_NORM_RELU


def describe(key: Key) -> Plan | str:
    """The product behind a key in evaluation; training needs the batch's statistics first."""
    x, weight, bias, mean, var, gamma, beta = key.tensors
    assert x is not None and weight is not None
    if key.flag("training"):
        return "the batch's statistics are needed before the epilogue"
    found = bind.product_of(x, weight)
    if isinstance(found, str):
        return found
    m, n, k, rows, w = found
    assert mean is not None and var is not None
    spec = GemmSpec(
        m, n, k, rows, w, Operand(x.dtype, n, 1),
        bias=bias.dtype if bias else None, mean=mean.dtype, var=var.dtype,
        scale=gamma.dtype if gamma else None, shift=beta.dtype if beta else None, activation="relu",
        z=x.dtype if key.flag("save") else None, early_z=True,
    )  # fmt: skip
    given = {
        "x": "x", "w": "weight", "bias": "bias", "mean": "running_mean", "var": "running_var",
        "scale": "gamma", "shift": "beta", "eps": repr(key.flag("eps")),
    }  # fmt: skip
    shape = (*x.shape[:-1], n)
    made = {"y": ("y", shape, x.dtype)} | ({"z": ("z", shape, x.dtype)} if key.flag("save") else {})
    return Plan((Product(spec, given, made),), tuple(made))


bind.candidate(LINEAR_BATCH_NORM_RELU, "triton.tiled", describe, (sys.modules[__name__],))
