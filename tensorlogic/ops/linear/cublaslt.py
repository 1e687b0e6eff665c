"""linear by passes around products, cuBLASLt's or Triton's: in float32 what follows the product, in backward what precedes two."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import torch

from ...core.key import Key
from ...kernels import register
from ...kernels.elementwise import column_passes, elementwise, epilogue_pass
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan, Product, Start
from ...kernels.reduce import contiguous
from ...kernels.triton_runtime import device_math
from . import LINEAR, LINEAR_BACKWARD, triton
from .triton import describe


def columns(key: Key, engine: str = "cublaslt") -> Plan | str:
    """z = x · weightᵀ in float32, then what follows it in one pass, in place where that can be.

    With an epilogue cuBLASLt offers fewer float32 algorithms, often none that splits K."""
    x, _, bias, residual = key.tensors
    assert x is not None
    found = register.one_dtype(key) or describe(key, engine)
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
    # y lies in z where that may be, else what is kept does
    y = "y" if keeps else "z"
    given = layer_plans.roles(
        {"y": y, "kept": "z"}, z=dtype, bias=bias, residual=residual, y=dtype, kept=dtype if keeps else None
    )  # fmt: skip

    def launch(dtypes: Any, config: Any, device: torch.device, align: int) -> Start:
        return epilogue_pass.finish_launcher(
            spec.m, spec.n, dtypes, other, spec.activation, config, device, align
        )

    product = Product(lone, {"x": "x", "w": "weight"}, {"y": ("z", shape, dtype)}, engine)
    made, choices = {"y": shape} if keeps else {}, epilogue_pass.finish_configs(spec.n)
    finish = layer_plans.pass_over(launch, given, made, choices)
    return Plan((product, finish), (y, "z") if keeps else (y,))


def backward(key: Key, engine: str) -> Plan | str:
    """A pass for dz = dy · act'(kept), with dbias where it is needed, then dx = dz · weight and dweight = dzᵀ · x."""
    dy, x, weight, kept = key.tensors
    assert dy is not None and x is not None and weight is not None
    needs, activation = key.flag("needs"), key.flag("activation")
    reason = register.one_dtype(key)
    if reason is not None:
        return reason
    found = layer_plans.matrices(("dy", dy), ("x", x), ("weight", weight))
    if isinstance(found, str):
        return found
    (rows, other, _), dtype, n = found, dy.dtype, weight.shape[0]
    if not register.is_contiguous(dy) and (activation != "none" or needs[2] == "1"):
        return "dy is not contiguous"
    dz, kind, passes = "dy", f"{activation}_bwd", list[Kernel]()
    if activation != "none":
        if kept is None or not register.is_contiguous(kept):
            return "the kept tensor is not contiguous"
        dz, rows = "dz", replace(rows, rows=n, columns=1)
        if needs[2] == "1":
            passes.append(layer_plans.gradient_with_sums(kind, dtype, dy.shape))
        else:
            given = ("dy", "kept")
            passes.append(layer_plans.pointwise(kind, dtype, given, ("dz",), dy.shape))
    elif needs[2] == "1":
        passes.append(layer_plans.column_sums("dy", dtype, prod(dy.shape[:-1]), n))
    names = ("dx", "dw", "db", "dz" if dz == "dz" else "dy.clone()")
    return layer_plans.gradients_after(key, engine, passes, dz, rows, other, names)


_PADDED, _SOURCES = ("cublaslt.padded", "triton.padded"), (column_passes, elementwise, contiguous)
gemm_register.add(LINEAR, describe, "cublaslt.epilogue", *_PADDED)
gemm_register.add(LINEAR, columns, "cublaslt.columns", sources=(epilogue_pass, column_passes, device_math, triton))
gemm_register.add(LINEAR, describe, "triton.one_row")
gemm_register.add(
    LINEAR_BACKWARD, backward, "cublaslt.products", "triton.products", *_PADDED, sources=_SOURCES
)
