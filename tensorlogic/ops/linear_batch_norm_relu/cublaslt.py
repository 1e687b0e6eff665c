"""linear_batch_norm_relu in evaluation by a product and one pass over its columns; backward by one pass and two products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.elementwise import column_passes
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan, Product
from ...kernels.gemm.layer_plans import dtype_of
from ...kernels.gemm.spec import Operand
from ...kernels.triton_runtime import device_math
from . import LINEAR_BATCH_NORM_RELU, LINEAR_BATCH_NORM_RELU_BACKWARD, triton
from .triton import STATISTICS


def _vectors(vectors: Sequence[TensorSpec | None]) -> str | None:
    """Why some of these vectors cannot be read as ones that lie together, or None."""
    for t in vectors:
        if t is not None and (
            t.dtype not in register.KERNEL_DTYPES or (prod(t.shape) != 1 and t.stride[0] != 1)
        ):
            return "a vector is strided or of another dtype"
    return None


def product(key: Key, engine: str, name: str) -> Product | str:
    """x · weightᵀ + bias under this name, for passes over its columns; or why it is none."""
    found = layer_plans.layer(key, engine)
    reason = register.one_dtype(key, "x", "weight", "bias") or _vectors(key.tensors[3:])
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    made = found.products[0]
    assert isinstance(made, Product)
    return replace(made, made={"y": (name, *made.made["y"][1:])})


def columns(key: Key, engine: str) -> Plan | str:
    """z = x · weightᵀ + bias, in float32 the bare product, then y = relu(batch_norm(z)) in one pass, which keeps z, too."""
    _, _, bias, mean, var, gamma, beta = key.tensors
    if key.flag("training") or mean is None or var is None:
        return "the batch's statistics are needed before the pass"
    found = product(key, engine, "product")
    reason = _vectors((bias,))
    if reason is not None or isinstance(found, str):
        return found if isinstance(found, str) else str(reason)
    (_, shape, dtype), m, n, kept = found.made["y"], found.spec.m, found.spec.n, key.flag("save")
    later = bias if dtype == "f32" else None
    if later is not None:
        found = replace(found, spec=replace(found.spec, bias=None))
    given = layer_plans.roles(
        {"z": "product", "kept": "product", **STATISTICS}, z=dtype, bias=later, mean=mean, var=var, gamma=gamma, beta=beta, y=dtype,
        kept=dtype if kept and later is not None else None,
    )  # fmt: skip
    launch, eps = partial(column_passes.apply_launcher, m, n), (repr(key.flag("eps")),)
    choices = column_passes.apply_configs(m, n)
    kernel = layer_plans.pass_over(launch, given, {"y": shape}, choices, eps)
    return Plan((found, kernel), ("y", "product") if kept else ("y",))


@dataclass(frozen=True)
class Operands:
    """What backward reads: x as a matrix, dy's shape, rows and columns."""

    x: Operand
    shape: tuple[int, ...]
    sides: tuple[int, int]


def backward_operands(key: Key) -> Operands | str:
    """The operands of a key, or why passes and products do not serve it."""
    dy, x, weight, y, z, *vectors = key.tensors
    assert dy is not None and x is not None and weight is not None
    found = layer_plans.matrices(("x", x), ("weight", weight), ("dy", dy))
    reason = register.one_dtype(key, "dy", "x", "weight", "y", "z") or _vectors(vectors)
    if reason is not None or isinstance(found, str):
        return reason or str(found)
    if not all(t is not None and register.is_contiguous(t) for t in (dy, y, z)):
        return "dy, y or z is not contiguous"
    return Operands(found[0], dy.shape, (prod(dy.shape[:-1]), weight.shape[0]))


def columns_backward(key: Key, engine: str) -> Plan | str:
    """One pass over dy, y and z for dz and all column sums, then dx = dz · weight and dweight = dzᵀ · x."""
    if key.flag("training"):
        return "dz needs the column sums first"
    found = backward_operands(key)
    if isinstance(found, str):
        return found
    (m, n), dtype, gamma = found.sides, found.x.dtype, key.spec("gamma")
    outer = dtype_of(gamma) or dtype
    given = layer_plans.roles(
        {"var": "spread"}, dy=dtype, y=dtype, z=dtype, mean=key.spec("mean"), var=key.spec("spread"), gamma=gamma, dz=dtype,
        db=dtype, dgamma=outer, dbeta=outer,
    )  # fmt: skip
    made = {"dz": found.shape, "db": (n,), "dgamma": (n,), "dbeta": (n,)}
    launch, eps = partial(column_passes.backward_launcher, m, n), (repr(key.flag("eps")),)
    choices = column_passes.backward_configs(m, n, register.cores())
    space = partial(column_passes.backward_space, n, 2)
    first = layer_plans.pass_over(launch, given, made, choices, eps, space)
    return with_products(key, engine, [first], found)


def with_products(key: Key, engine: str, passes: Sequence[Kernel], found: Operands) -> Plan | str:
    """The passes that make contiguous dz [m, N], db, dgamma and dbeta, then dx = dz · weight and dweight = dzᵀ · x as far as needed."""
    dz, names = Operand(found.x.dtype, found.sides[1], 1), ("dx", "dw", "db", "dgamma", "dbeta")
    return layer_plans.gradients_after(key, engine, passes, "dz", dz, found.x, names)


_SOURCES = (column_passes, device_math, triton)
gemm_register.add(
    LINEAR_BATCH_NORM_RELU, columns, "cublaslt.columns", "cublaslt.padded", sources=_SOURCES
)
gemm_register.add(
    LINEAR_BATCH_NORM_RELU_BACKWARD, columns_backward, "cublaslt.columns", "triton.columns", "cublaslt.padded", sources=_SOURCES
)  # fmt: skip
