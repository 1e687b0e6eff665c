"""linear in float32 by cuBLASLt's bare product, then bias, residual and activation in one pass.

With an epilogue cuBLASLt offers fewer float32 algorithms, often none that splits K."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ...core.key import Key
from ...kernels import register
from ...kernels.elementwise import column_passes, epilogue_pass
from ...kernels.gemm import bind
from ...kernels.gemm.bind import Kernel, Plan, Product, Start
from ...kernels.triton_runtime import device_math
from . import LINEAR, triton


def describe(key: Key) -> Plan | str:
    """z = x · weightᵀ in float32, then what follows it, in place where that can be."""
    x, _, bias, residual = key.tensors
    assert x is not None
    found = register.one_dtype(key) or triton.describe(key)
    if isinstance(found, str):
        return found
    if x.dtype != "f32":
        return "16-bit products do what follows them themselves"
    if bias is None and residual is None and key.flag("activation") == "none":
        return "nothing follows the product"
    if bias is not None and prod(bias.shape) > 1 and bias.stride[-1] != 1:
        return "bias is strided"
    whole = found.products[0]
    assert isinstance(whole, Product)
    spec, (_, shape, dtype), keeps = whole.spec, whole.made["y"], whole.spec.z is not None
    lone = replace(spec, bias=None, outer="none", residual=None, activation="none", z=None)
    other = (0, 0) if spec.residual is None else (spec.residual.rows, spec.residual.columns)
    # name of each tensor of the pass: y lies in z where that may be, else what is kept does
    y, kept = ("y", "z") if keeps else ("z", None)
    given = {
        "z": "z", "bias": bias and "bias", "residual": residual and "residual", "y": y, "kept": kept,
    }  # fmt: skip
    dtypes = {role: dtype if name else None for role, name in given.items()}

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return epilogue_pass.finish_launcher(
            spec.m, spec.n, dtypes, other, spec.activation, config, device, align
        )

    product = Product(lone, {"x": "x", "w": "weight"}, {"y": ("z", shape, dtype)}, "cublaslt")
    outs = tuple(name for name in (y, kept) if name)
    kernel = Kernel(
        tuple(name for name in given.values() if name),
        {name: (name, shape, dtype) for name in outs if name != "z"},
        epilogue_pass.finish_configs(spec.n),
        build,
    )
    return Plan((product, kernel), outs)


bind.candidate(
    LINEAR,
    "cublaslt.columns",
    describe,
    (epilogue_pass, column_passes, device_math, triton, sys.modules[__name__]),
)
