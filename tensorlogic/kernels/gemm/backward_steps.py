"""Steps that several ops' plans share: element-wise passes around products, and the two products of a backward pass."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch

from ...core.key import TensorSpec
from .. import register
from . import bind
from .bind import Kernel, Product, Start
from .spec import GemmSpec, Operand

# configurations of an element-wise pass that are tried beside the products' own
PASSES = 4


def pointwise(
    kind: str, dtype: str, given: tuple[str, ...], names: tuple[str, ...], shape: tuple[int, ...]
) -> Kernel:
    """The element-wise `kind` of contiguous tensors of one shape, into `names`."""
    from ..elementwise import elementwise

    dtypes, modes = [dtype] * (len(given) + len(names)), ("full",) * len(given)

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return elementwise.elementwise_launcher(
            kind, dtypes, 1, prod(shape), modes, config, device, align
        )

    configs = elementwise.elementwise_configs(dtypes, 1, prod(shape), modes)
    return Kernel(
        (*given, *names),
        {name: (name, shape, dtype) for name in names},
        tuple(configs[:PASSES]),
        build,
    )


def gradient_with_sums(kind: str, dtype: str, shape: tuple[int, ...]) -> Kernel:
    """dz = dy · act'(kept) and db = the sums of its columns, in one pass over contiguous dy and kept."""
    from ..elementwise import column_passes

    m, n = prod(shape[:-1]), shape[-1]

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return column_passes.activation_backward_launcher(kind, m, n, dtype, config, device, align)

    made = {"dz": ("dz", shape, dtype), "db": ("db", (n,), dtype)}
    choices = column_passes.backward_configs(m, n, register.cores())
    space = partial(column_passes.backward_space, n, 1)
    return Kernel(("dy", "kept", "dz", "db", "space", "counter"), made, choices, build, space)


def column_sums(dy: str, dtype: str, m: int, n: int) -> Kernel:
    """db [N] = the sums of the columns of contiguous dy [m, N]."""
    from ..reduce import contiguous

    choices = [
        c
        for c in contiguous.reduce_configs(1, m, n, dtype, register.cores())
        if c["last"] or c["parts"] == 1
    ]

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return contiguous.reduce_launcher("sum", dtype, dtype, 1, m, n, config, device, align)

    def space(config: dict[str, Any]) -> tuple[int, int]:
        partials, counters = contiguous.reduce_workspace(1, m, n, config)
        return max(partials, 1), max(counters, 1)

    return Kernel(
        (dy, "db", "space", "counter"),
        {"db": ("db", (n,), dtype)},
        tuple(choices[:PASSES]),
        build,
        space,
    )


def bias_gradient(dy: TensorSpec, n: int) -> tuple[list[Kernel], str]:
    """db [N] of dy [..., N], as a launch where that is possible, and the expression for it."""
    if not register.is_contiguous(dy):
        return [], f"dy.reshape(-1, {n}).sum(0)"
    return [column_sums("dy", dy.dtype, prod(dy.shape[:-1]), n)], "db"


def input_gradient(
    engine: str,
    dy: str,
    rows: Operand,
    weight: TensorSpec,
    m: int,
    shape: tuple[int, ...],
    name: str = "dx",
    **more: Any,
) -> Product:
    """dx [m, K] = dy [m, N] · weight [N, K]."""
    (n, k), dtype = weight.shape, rows.dtype
    spec = GemmSpec(m, k, n, rows, Operand(dtype, *weight.stride), Operand(dtype, k, 1), **more)
    given = {"x": dy, "w": "weight", "residual": "x"}
    return Product(spec, given, {"y": (name, shape, dtype)}, engine)


def weight_gradient(
    engine: str, dy: str, rows: Operand, x: str, other: Operand, m: int, n: int, k: int
) -> Product:
    """dw [N, K] = dy [m, N]ᵀ · x [m, K]."""
    dtype = rows.dtype
    spec = GemmSpec(n, k, m, Operand(dtype, rows.columns, rows.rows), other, Operand(dtype, k, 1))
    return Product(spec, {"x": dy, "w": x}, {"y": ("dw", (n, k), dtype)}, engine)


def flat(t: TensorSpec, name: str) -> Operand | str:
    """A contiguous [..., columns] tensor as a matrix, or why it is none."""
    if not t.shape or 0 in t.shape:
        return f"{name} is empty"
    return (
        Operand(t.dtype, t.shape[-1], 1)
        if register.is_contiguous(t)
        else f"{name} is not contiguous"
    )


def matrices(*named: tuple[str, TensorSpec]) -> list[Operand] | str:
    """Each tensor as a matrix of evenly spaced rows, or why one is none."""
    found = []
    for name, t in named:
        if not t.shape or 0 in t.shape:
            return f"{name} is empty"
        operand = bind.matrix(t)
        if operand is None:
            return f"{name}'s rows are not evenly spaced"
        found.append(operand)
    return found
