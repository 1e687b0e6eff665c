"""linear_batch_norm_relu in training: a product, then the batch's statistics and what follows them in one pass or two; backward likewise
before two products."""

from __future__ import annotations

import itertools
import sys
from functools import partial
from math import prod
from typing import Any

import torch

from ...core import dtypes as core_dtypes
from ...core import tolerance
from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.elementwise import column_passes
from ...kernels.gemm import backward_steps, bind
from ...kernels.gemm.bind import Kernel, Plan, Product, Start
from ...kernels.gemm.spec import GemmSpec, Operand
from ...kernels.norm import batch_norm as norm_batch_norm
from . import LINEAR_BATCH_NORM_RELU, LINEAR_BATCH_NORM_RELU_BACKWARD
from .cublaslt import dtypes_of, vectors_refusal, with_products

GIVEN = "the statistics are given"
LONG = "columns are too long to be held"
SPREAD = {"spread": "rstd"}  # what the op calls 1/std in backward


def _kernel(
    kernel: Any, m: int, n: int, named: dict[str, str | None], made: dict[str, Any],
    choices: tuple[dict[str, Any], ...], numbers: dict[str, str], slots: int = 0,
) -> Kernel:  # fmt: skip
    """A pass over [m, n] that takes what is `named`, by dtype, then scratch for `slots` sums a column, then `numbers`."""
    dtypes = {SPREAD.get(name, name): dtype for name, dtype in named.items()}

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return column_passes.launcher(kernel, m, n, dtypes, config, device, align, tuple(numbers))

    given = tuple(name for name, dtype in named.items() if dtype is not None)
    outs = {name: (name, shape, named[name] or "") for name, shape in made.items()}
    if not slots:
        return Kernel((*given, *numbers.values()), outs, choices, build)
    space = partial(column_passes.backward_space, n, slots)
    return Kernel((*given, "space", "counter", *numbers.values()), outs, choices, build, space)


def describe(key: Key, engine: str, held: bool) -> Plan | str:
    """z = x · weightᵀ + bias, its columns' statistics, y = relu(batch_norm(z)): whole columns `held` in one pass, or in two."""
    x, weight, bias, running_mean, running_var, gamma, beta = key.tensors
    assert x is not None and weight is not None
    if not key.flag("training"):
        return GIVEN
    found = bind.product_of(x, weight)
    reason = register.one_dtype(key, "x", "weight", "bias")
    reason = reason or vectors_refusal((running_mean, running_var, gamma, beta))
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    m, n, k, rows, w = found
    if m < 2:
        return "one row has no variance"
    shape, dtype = (*x.shape[:-1], n), x.dtype
    spec = GemmSpec(m, n, k, rows, w, Operand(dtype, n, 1), bias=bias.dtype if bias else None)
    given = {"x": "x", "w": "weight", "bias": "bias"}
    steps: list[Kernel | Product] = [Product(spec, given, {"y": ("z", shape, dtype)}, engine)]
    running = {"running_mean": running_mean, "running_var": running_var}
    eps, momentum = ({name: repr(key.flag(name))} for name in ("eps", "momentum"))
    affine = {"gamma": gamma, "beta": beta}
    if held:
        choices = norm_batch_norm.held_configs(m, n, "fwd")
        if not choices:
            return LONG
        named = dtypes_of(z=dtype, **running, **affine, y=dtype, mean="f32", rstd="f32")
        made = {"y": shape, "mean": (n,), "rstd": (n,)}
        kernel = norm_batch_norm.batch_norm_relu_fwd_held
        steps.append(_kernel(kernel, m, n, named, made, choices, eps | momentum))
    else:
        named = dtypes_of(z=dtype, mean="f32", var="f32", rstd="f32")
        choices = column_passes.backward_configs(m, n, register.cores())
        vectors = {"mean": (n,), "var": (n,), "rstd": (n,)}
        kernel = norm_batch_norm.batch_statistics_columns
        steps.append(_kernel(kernel, m, n, named, vectors, choices, eps, slots=2))
        named = dtypes_of(**named, **running, **affine, y=dtype)
        choices, kernel = (
            column_passes.apply_configs(m, n),
            norm_batch_norm.batch_norm_relu_fwd_trained,
        )
        steps.append(_kernel(kernel, m, n, named, {"y": shape}, choices, momentum))
    z = "z" if key.flag("save") else "empty((0,), (1,), z_dtype)"
    return Plan(tuple(steps), ("y", z, "mean", "rstd"))


def describe_backward(key: Key, engine: str, held: bool) -> Plan | str:
    """dz and the vectors' gradients in one pass or two, then dx = dz · weight and dweight = dzᵀ · x."""
    dy, x, weight, y, z, mean, rstd, gamma = key.tensors
    assert (
        dy is not None and x is not None and weight is not None and y is not None and z is not None
    )
    if not key.flag("training"):
        return GIVEN
    found = backward_steps.matrices(("x", x), ("weight", weight), ("dy", dy))
    reason = register.one_dtype(key, "dy", "x", "weight", "y", "z")
    reason = reason or vectors_refusal((mean, rstd, gamma))
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    if not all(register.is_contiguous(t) for t in (dy, y, z)):
        return "dy, y or z is not contiguous"
    m, n, dtype = prod(dy.shape[:-1]), weight.shape[0], weight.dtype
    outer = gamma.dtype if gamma else dtype
    kept: dict[str, TensorSpec | str | None] = {"dy": dtype, "y": dtype, "z": dtype, "mean": mean, "spread": rstd}  # fmt: skip
    sums = {"db": dtype, "dgamma": outer, "dbeta": outer}
    vectors = dict.fromkeys(sums, (n,))
    if held:
        choices = norm_batch_norm.held_configs(m, n, "bwd")
        if not choices:
            return LONG
        named = dtypes_of(**kept, gamma=gamma, dz=dtype, **sums)
        made = {"dz": dy.shape, **vectors}
        kernel = norm_batch_norm.batch_norm_relu_bwd_held
        steps = [_kernel(kernel, m, n, named, made, choices, {})]
    else:
        named = dtypes_of(**kept, gamma=gamma, total="f32", moment="f32", **sums)
        made = {"total": (n,), "moment": (n,), **vectors}
        choices = norm_batch_norm.sums_configs(m, n, register.cores())
        kernel = norm_batch_norm.batch_norm_relu_bwd_sums
        steps = [_kernel(kernel, m, n, named, made, choices, {}, slots=3)]
        named = dtypes_of(**kept, gamma=gamma, total="f32", moment="f32", dz=dtype)
        choices = column_passes.apply_configs(m, n)
        kernel = norm_batch_norm.batch_norm_relu_bwd_tiled
        steps.append(_kernel(kernel, m, n, named, {"dz": dy.shape}, choices, {}))
    return with_products(steps, engine, key.flag("needs"), m, x, weight, found[0])


def _rounding(key: Key) -> float:
    """How far off statistics in float32 may be: as the product in x's dtype that they are of. Some of cuBLASLt's algorithms round to one
    side (a mean of 300 halves 4e-5 off, 1.7e-5 to nearest)."""
    x = key.spec("x")
    assert x is not None
    return tolerance.floor(core_dtypes.DTYPES[x.dtype])


def _exact(key: Key) -> float:
    return 0.0


_SOURCES = (norm_batch_norm, column_passes, backward_steps, sys.modules[__name__])
for _engine, _held in itertools.product(("cublaslt", "triton"), (True, False)):
    for _op, _describe, _coarse in (
        (LINEAR_BATCH_NORM_RELU, describe, _rounding if _engine == "cublaslt" else _exact),
        (LINEAR_BATCH_NORM_RELU_BACKWARD, describe_backward, _exact),
    ):
        bind.candidate(
            _op,
            f"{_engine}.{'held' if _held else 'statistics'}",
            partial(_describe, engine=_engine, held=_held),
            _SOURCES,
            _coarse,
        )
