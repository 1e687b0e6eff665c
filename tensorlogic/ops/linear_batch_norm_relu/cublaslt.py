"""linear_batch_norm_relu in evaluation by a product and one pass over its columns; backward by one pass and two products."""

from __future__ import annotations

import sys
from functools import partial
from math import prod
from typing import Any

import torch

from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.elementwise import column_passes
from ...kernels.gemm import backward_steps, bind, padded
from ...kernels.gemm.bind import Kernel, Plan, Product, Start
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.triton_runtime import device_math
from . import LINEAR_BATCH_NORM_RELU, LINEAR_BATCH_NORM_RELU_BACKWARD


def vectors_refusal(vectors: tuple[TensorSpec | None, ...]) -> str | None:
    """Why some of these vectors cannot be read as ones that lie together, or None."""
    for t in vectors:
        if t is not None and (
            t.dtype not in register.KERNEL_DTYPES or (prod(t.shape) != 1 and t.stride[0] != 1)
        ):
            return "a vector is strided or of another dtype"
    return None


def dtypes_of(**given: TensorSpec | str | None) -> dict[str, str | None]:
    """dtype by name; None: absent."""
    return {name: t.dtype if isinstance(t, TensorSpec) else t for name, t in given.items()}


def describe(key: Key) -> Plan | str:
    """z = x · weightᵀ + bias, in float32 the bare product, then y = relu(batch_norm(z)) in one pass, which keeps z, too."""
    x, weight, bias, mean, var, gamma, beta = key.tensors
    assert x is not None and weight is not None
    if key.flag("training") or mean is None or var is None:
        return "the batch's statistics are needed before the pass"
    found = bind.product_of(x, weight)
    reason = register.one_dtype(key, "x", "weight", "bias") or vectors_refusal(
        (bias, mean, var, gamma, beta)
    )
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    m, n, k, rows, w = found
    shape, dtype, kept = (*x.shape[:-1], n), x.dtype, bool(key.flag("save"))
    after = dtype == "f32"  # bias
    spec = GemmSpec(
        m, n, k, rows, w, Operand(dtype, n, 1), bias=bias.dtype if bias and not after else None
    )
    given = {"x": "x", "w": "weight", "bias": "bias"}
    product = Product(spec, given, {"y": ("product", shape, dtype)}, "cublaslt")
    named = {
        "z": "product", "bias": "bias" if bias and after else None, "mean": "running_mean", "var": "running_var",
        "gamma": gamma and "gamma", "beta": beta and "beta", "y": "y", "kept": "product" if kept and bias and after else None,
    }  # fmt: skip
    specs = {"bias": bias, "mean": mean, "var": var, "gamma": gamma, "beta": beta}
    kinds = dtypes_of(**{role: specs.get(role, dtype) for role in named})
    dtypes = {role: kinds[role] if name else None for role, name in named.items()}

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return column_passes.apply_launcher(m, n, dtypes, config, device, align)

    arguments = tuple(name for name in named.values() if name)
    kernel = Kernel(
        (*arguments, repr(key.flag("eps"))),
        {"y": ("y", shape, dtype)},
        column_passes.apply_configs(m, n),
        build,
    )
    return Plan((product, kernel), ("y", "product") if kept else ("y",))


def describe_backward(key: Key, engine: str = "cublaslt") -> Plan | str:
    """One pass over dy, y and z for dz and all column sums, then dx = dz · weight and dweight = dzᵀ · x."""
    dy, x, weight, y, z, mean, var, gamma = key.tensors
    assert (
        dy is not None and x is not None and weight is not None and y is not None and z is not None
    )
    if key.flag("training"):
        return "dz needs the column sums first"
    found = backward_steps.matrices(("x", x), ("weight", weight), ("dy", dy))
    reason = register.one_dtype(key, "dy", "x", "weight", "y", "z") or vectors_refusal(
        (mean, var, gamma)
    )
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    if not all(register.is_contiguous(t) for t in (dy, y, z)):
        return "dy, y or z is not contiguous"
    m, n, dtype = prod(dy.shape[:-1]), weight.shape[0], dy.dtype
    outer = gamma.dtype if gamma else dtype
    dtypes = dtypes_of(
        dy=dtype, y=dtype, z=dtype, mean=mean, var=var, gamma=gamma, dz=dtype, db=dtype, dgamma=outer, dbeta=outer
    )  # fmt: skip

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return column_passes.backward_launcher(m, n, dtypes, config, device, align)

    named = (
        "dy",
        "y",
        "z",
        "mean",
        "spread",
        *("gamma",) * bool(gamma),
        "dz",
        "db",
        "dgamma",
        "dbeta",
        "space",
        "counter",
    )
    made = {"dz": ("dz", dy.shape, dtype)} | {
        name: (name, (n,), kind)
        for name, kind in (("db", dtype), ("dgamma", outer), ("dbeta", outer))
    }
    choices = column_passes.backward_configs(m, n, register.cores())
    first = Kernel(
        (*named, repr(key.flag("eps"))),
        made,
        choices,
        build,
        partial(column_passes.backward_space, n, 2),
    )
    return with_products([first], engine, key.flag("needs"), m, x, weight, found[0])


def with_products(
    passes: list[Kernel],
    engine: str,
    needs: str,
    m: int,
    x: TensorSpec,
    weight: TensorSpec,
    other: Operand,
) -> Plan:
    """The passes that make contiguous dz [m, N], db, dgamma and dbeta, then dx = dz · weight and dweight = dzᵀ · x as far as needed; `other`:
    x as a matrix."""
    n, k = weight.shape
    steps, rows = list[Kernel | Product](passes), Operand(weight.dtype, n, 1)
    if needs[0] == "1":
        steps.append(backward_steps.input_gradient(engine, "dz", rows, weight, m, x.shape))
    if needs[1] == "1":
        steps.append(backward_steps.weight_gradient(engine, "dz", rows, "x", other, m, n, k))
    names = zip(("dx", "dw", "db", "dgamma", "dbeta"), needs, strict=True)
    return Plan(tuple(steps), tuple(name if need == "1" else "None" for name, need in names))


_SOURCES = (column_passes, device_math, backward_steps, sys.modules[__name__])
bind.candidate(LINEAR_BATCH_NORM_RELU, "cublaslt.columns", describe, _SOURCES)
bind.candidate(LINEAR_BATCH_NORM_RELU_BACKWARD, "cublaslt.columns", describe_backward, _SOURCES)
bind.candidate(
    LINEAR_BATCH_NORM_RELU_BACKWARD,
    "triton.columns",
    partial(describe_backward, engine="triton"),
    _SOURCES,
)
padded.candidate(LINEAR_BATCH_NORM_RELU, "cublaslt.padded", describe, _SOURCES)
padded.candidate(LINEAR_BATCH_NORM_RELU_BACKWARD, "cublaslt.padded", describe_backward, _SOURCES)
