"""layer_norm_linear by one product: rows normalised on their way to the tensor cores, statistics taken by each tile row."""

from __future__ import annotations

from ...core.key import Key
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Plan
from ...kernels.gemm.layer_plans import dtype_of
from . import LAYER_NORM_LINEAR, saves

FEW_ROWS = 8  # up to which there are few enough tiles at any size


def describe(key: Key, engine: str = "triton") -> Plan | str:
    """One product, of any size, whose tiles read their rows twice: for mean and variance, then for the product."""
    given = {"gamma": "gamma", "beta": "beta", "eps": repr(key.flag("eps"))}
    gamma, beta = (dtype_of(key.spec(name)) for name in ("gamma", "beta"))
    return layer_plans.layer(
        key, engine, given, prologue="layer_norm", inline=True, gamma=gamma, beta=beta
    )


def tiled(key: Key, engine: str) -> Plan | str:
    """The same where tiles are few enough to take the statistics of a row again and again."""
    if saves(key):
        return "normalised rows are kept for backward, and its tiles make them in registers"
    return layer_plans.small(key, describe(key, engine), "norm", FEW_ROWS)


gemm_register.add(LAYER_NORM_LINEAR, tiled, "triton.inline")
