"""linear_batch_norm_relu in evaluation by one product: normalisation, scale, shift and ReLU in the epilogue."""

from __future__ import annotations

from typing import Any

from ...core.key import Key
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Plan
from ...kernels.gemm.layer_plans import dtype_of
from . import LINEAR_BATCH_NORM_RELU

STATISTICS = {"mean": "running_mean", "var": "running_var"}


def describe(key: Key, engine: str = "triton") -> Plan | str:
    """One product in evaluation; training needs the batch's statistics first."""
    x, weight, _, mean, var, gamma, beta = key.tensors
    assert x is not None and weight is not None
    if key.flag("training") or mean is None or var is None:
        return "the batch's statistics are needed before the epilogue"
    given = {**STATISTICS, "scale": "gamma", "shift": "beta", "eps": repr(key.flag("eps"))}
    vectors = {"mean": mean, "var": var, "scale": gamma, "shift": beta}
    about: dict[str, Any] = {role: dtype_of(t) for role, t in vectors.items()}
    z = x.dtype if key.flag("save") else None
    return layer_plans.layer(key, engine, given, activation="relu", z=z, early_z=True, **about)


gemm_register.add(LINEAR_BATCH_NORM_RELU, describe, "triton.tiled")
