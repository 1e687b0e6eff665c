"""linear_batch_norm_relu in training: a product, then the batch's statistics and what follows them in one pass or two; backward likewise
before two products."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ...core import dtypes as core_dtypes
from ...core import tolerance
from ...core.key import Key
from ...kernels import register
from ...kernels.elementwise import column_passes
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan
from ...kernels.gemm.layer_plans import Role, dtype_of, roles
from ...kernels.norm import batch_norm
from . import LINEAR_BATCH_NORM_RELU, LINEAR_BATCH_NORM_RELU_BACKWARD, cublaslt, triton

GIVEN = "the statistics are given"
LONG = "columns are too long to be held"


def _pass(
    kernel: Any, m: int, n: int, given: Mapping[str, Role], made: Mapping[str, tuple[int, ...]],
    choices: tuple[dict[str, Any], ...], numbers: Mapping[str, str], slots: int = 0,
) -> Kernel:  # fmt: skip
    """A pass over matrices [m, n], with scratch for `slots` sums a column."""
    launch = partial(column_passes.launcher, kernel, m, n, floats=tuple(numbers))
    space = partial(column_passes.backward_space, n, slots) if slots else None
    return layer_plans.pass_over(launch, given, made, choices, tuple(numbers.values()), space)


def describe(key: Key, engine: str, held: bool) -> Plan | str:
    """z = x · weightᵀ + bias, its columns' statistics, y = relu(batch_norm(z)): whole columns `held` in one pass, or in two."""
    _, _, _, running_mean, running_var, gamma, beta = key.tensors
    if not key.flag("training"):
        return GIVEN
    found = cublaslt.product(key, engine, "z")
    if isinstance(found, str):
        return found
    (_, shape, dtype), m, n = found.made["y"], found.spec.m, found.spec.n
    if m < 2:
        return "one row has no variance"
    eps, momentum = ({name: repr(key.flag(name))} for name in ("eps", "momentum"))
    vectors = roles(running_mean=running_mean, running_var=running_var, gamma=gamma, beta=beta)
    if held:
        choices = batch_norm.held_configs(m, n, "fwd")
        if not choices:
            return LONG
        given = roles(z=dtype) | vectors | roles(y=dtype, mean="f32", rstd="f32")
        made = {"y": shape, "mean": (n,), "rstd": (n,)}
        kernel = batch_norm.batch_norm_relu_fwd_held
        steps = [_pass(kernel, m, n, given, made, choices, eps | momentum)]
    else:
        given = roles(z=dtype, mean="f32", var="f32", rstd="f32")
        choices = column_passes.backward_configs(m, n, register.cores())
        made = dict.fromkeys(("mean", "var", "rstd"), (n,))
        kernel = batch_norm.batch_statistics_columns
        steps = [_pass(kernel, m, n, given, made, choices, eps, slots=2)]
        given = given | vectors | roles(y=dtype)
        choices, kernel = column_passes.apply_configs(m, n), batch_norm.batch_norm_relu_fwd_trained
        steps.append(_pass(kernel, m, n, given, {"y": shape}, choices, momentum))
    z = "z" if key.flag("save") else "empty((0,), (1,), z_dtype)"
    return Plan((found, *steps), ("y", z, "mean", "rstd"))


def describe_backward(key: Key, engine: str, held: bool) -> Plan | str:
    """dz and the vectors' gradients in one pass or two, then dx = dz · weight and dweight = dzᵀ · x."""
    if not key.flag("training"):
        return GIVEN
    found = cublaslt.backward_operands(key)
    if isinstance(found, str):
        return found
    (m, n), dtype, shape, gamma = found.sides, found.x.dtype, found.shape, key.spec("gamma")
    mean, rstd, outer = key.spec("mean"), key.spec("spread"), dtype_of(gamma) or dtype
    # what the op calls 1/std in backward
    spread = {"rstd": "spread"}
    kept = roles(spread, dy=dtype, y=dtype, z=dtype, mean=mean, rstd=rstd, gamma=gamma)
    sums = roles(db=dtype, dgamma=outer, dbeta=outer)
    vectors = dict.fromkeys(sums, (n,))
    if held:
        choices = batch_norm.held_configs(m, n, "bwd")
        if not choices:
            return LONG
        given, kernel = kept | roles(dz=dtype) | sums, batch_norm.batch_norm_relu_bwd_held
        steps = [_pass(kernel, m, n, given, {"dz": shape, **vectors}, choices, {})]
    else:
        kept = kept | roles(total="f32", moment="f32")
        made = {"total": (n,), "moment": (n,), **vectors}
        choices = batch_norm.sums_configs(m, n, register.cores())
        kernel = batch_norm.batch_norm_relu_bwd_sums
        steps = [_pass(kernel, m, n, kept | sums, made, choices, {}, slots=3)]
        choices, kernel = column_passes.apply_configs(m, n), batch_norm.batch_norm_relu_bwd_tiled
        steps.append(_pass(kernel, m, n, kept | roles(dz=dtype), {"dz": shape}, choices, {}))
    return cublaslt.with_products(key, engine, steps, found)


def _rounding(key: Key) -> float:
    """How far off statistics in float32 may be: as the product in x's dtype that they are of. Some of cuBLASLt's algorithms round to one
    side (a mean of 300 halves 4e-5 off, 1.7e-5 to nearest)."""
    x = key.spec("x")
    assert x is not None
    return tolerance.floor(core_dtypes.DTYPES[x.dtype])


def _exact(key: Key) -> float:
    return 0.0


_SOURCES = (batch_norm, column_passes, cublaslt)
for _engine, _coarse in (("cublaslt", _rounding), ("triton", _exact)):
    for _strategy, _held in (("held", True), ("statistics", False)):
        for _op, _describe, _error in (
            (LINEAR_BATCH_NORM_RELU, describe, _coarse),
            (LINEAR_BATCH_NORM_RELU_BACKWARD, describe_backward, _exact),
        ):
            _plans = partial(_describe, held=_held)
            gemm_register.add(
                _op, _plans, f"{_engine}.{_strategy}", sources=_SOURCES, coarse=_error
            )
gemm_register.add(LINEAR_BATCH_NORM_RELU, triton.describe, "triton.one_row")
