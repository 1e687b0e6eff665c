"""linear by a library's product, then the rest of bias, residual and activation in one pass.

With an epilogue cuBLASLt offers fewer algorithms, of float32 often none that splits K, and 16-bit ones that split it are not of the fastest:
theirs are bare, of 16-bit operands into float32, where few tiles leave most of a GPU idle. PyTorch's choice is another one at times."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from math import ceil, prod
from typing import Any

import torch

from ...plans import Key
from ..common import gemm_wiring, triton_finish, triton_math, wiring
from ..common.gemm_wiring import Kernel, Plan, Product, Start
from . import LINEAR, triton_tiled

TILE = 128  # rows and columns of what one multiprocessor makes of a large product


def fills(m: int, n: int) -> bool:
    """Whether a product has a tile for every multiprocessor, so that nothing is gained by splitting K."""
    return ceil(m / TILE) * ceil(n / TILE) >= wiring.cores()


def describe(key: Key, engine: str, sums: str = "") -> Plan | str:
    """z = x · weightᵀ, with PyTorch's bias, in x's dtype or in `sums`, then what follows it, in place where that can be."""
    x, _, bias, residual = key.tensors
    assert x is not None
    found = wiring.one_dtype(key) or triton_tiled.describe(key)
    if isinstance(found, str):
        return found
    if engine == "cublaslt" and (x.dtype == "f32") == bool(sums):
        return "float32 sums are for 16-bit products, and these do what follows them themselves"
    within = engine == "torch"  # the bias
    if (bias is None or within) and residual is None and key.flag("activation") == "none":
        return "nothing follows the product"
    if bias is not None and prod(bias.shape) > 1 and bias.stride[-1] != 1:
        return "bias is strided"
    whole = found.products[0]
    assert isinstance(whole, Product)
    spec, (_, shape, dtype), keeps = whole.spec, whole.made["y"], whole.spec.z is not None
    if sums and fills(spec.m, spec.n):
        return "tiles enough: nothing to split"
    made = sums or dtype
    lone = replace(
        spec, bias=spec.bias if within else None, outer="none", residual=None, activation="none", z=None,
        y=replace(spec.y, dtype=made),
    )  # fmt: skip
    other = (0, 0) if spec.residual is None else (spec.residual.rows, spec.residual.columns)
    # name of each tensor of the pass: y lies in z where that may be, else what is kept does
    y = "y" if sums or keeps else "z"
    kept = ("kept" if sums else "z") if keeps else None
    given = {
        "z": "z", "bias": None if within or bias is None else "bias", "residual": residual and "residual", "y": y, "kept": kept,
    }  # fmt: skip
    dtypes = {
        role: (made if role == "z" else dtype) if name else None for role, name in given.items()
    }

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return triton_finish.finish_launcher(
            spec.m, spec.n, dtypes, other, spec.activation, config, device, align
        )

    product = Product(
        lone, {"x": "x", "w": "weight", "bias": "bias"}, {"y": ("z", shape, made)}, engine
    )
    outs = tuple(name for name in (y, kept) if name)
    kernel = Kernel(
        tuple(name for name in given.values() if name),
        {name: (name, shape, dtype) for name in outs if name != "z"},
        triton_finish.finish_configs(spec.n),
        build,
    )
    return Plan((product, kernel), outs)


_SOURCES = (triton_finish, triton_math, triton_tiled, sys.modules[__name__])
for _id, _engine, _sums in (
    ("cublaslt.columns", "cublaslt", ""),
    ("cublaslt.sums", "cublaslt", "f32"),
    ("torch.columns", "torch", ""),
):
    gemm_wiring.candidate(LINEAR, _id, partial(describe, engine=_engine, sums=_sums), _SOURCES)
