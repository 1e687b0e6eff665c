"""linear in float32 by a bare product of cuBLASLt's, then bias, residual and activation in one pass in its memory.

With an epilogue the library offers fewer algorithms, of float32 often none that splits K; 16-bit products are bound by memory,
and theirs follow in the product."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import prod
from typing import Any

import torch

from ...plans import Key
from ..common import gemm_wiring, triton_finish, wiring
from ..common.gemm_wiring import Kernel, Plan, Product, Start
from . import LINEAR, triton_tiled


def describe(key: Key) -> Plan | str:
    """z = x · weightᵀ, then what follows it, in place where nothing is kept."""
    x, _, bias, residual = key.tensors
    assert x is not None
    found = wiring.one_dtype(key) or triton_tiled.describe(key)
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
    bare = replace(spec, bias=None, outer="none", residual=None, activation="none", z=None)
    other = None if spec.residual is None else (spec.residual.rows, spec.residual.columns)

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return triton_finish.finish_launcher(
            spec.m, spec.n, dtype, spec.activation, config, device,
            bias=bias is not None, residual=other, kept=keeps, align=align,
        )  # fmt: skip

    given = ("z", *("bias",) * bool(bias), *("residual",) * bool(residual), *("y",) * keeps)
    product = Product(bare, {"x": "x", "w": "weight"}, {"y": ("z", shape, dtype)}, "cublaslt")
    made = {"y": ("y", shape, dtype)} if keeps else {}
    kernel = Kernel(given, made, triton_finish.finish_configs(spec.n), build)
    return Plan((product, kernel), ("y", "z") if keeps else ("z",))


gemm_wiring.candidate(
    LINEAR, "cublaslt.columns", describe, (triton_finish, triton_tiled, sys.modules[__name__])
)
