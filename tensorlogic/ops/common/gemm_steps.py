"""Steps that several ops' plans share: element-wise passes around products, and the two products of a backward pass."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...plans import TensorSpec
from . import gemm_wiring, wiring
from .gemm import GemmSpec, Operand
from .gemm_wiring import Kernel, Product, Start

PASSES = 4  # configurations of an element-wise pass that are tried beside the products' own


def pointwise(kind: str, dtype: str, given: tuple[str, ...], name: str, shape: tuple[int, ...]) -> Kernel:
    """The element-wise `kind` of contiguous tensors of one shape, into `name`."""
    from . import triton_elementwise

    dtypes, modes = [dtype] * (len(given) + 1), ("full",) * len(given)

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return triton_elementwise.elementwise_launcher(kind, dtypes, 1, prod(shape), modes, config, device, align)

    configs = triton_elementwise.elementwise_configs(dtypes, 1, prod(shape), modes)
    return Kernel((*given, name), {name: (name, shape, dtype)}, tuple(configs[:PASSES]), build)


def input_gradient(
    engine: str, dy: str, rows: Operand, weight: TensorSpec, m: int, shape: tuple[int, ...], name: str = "dx", **more: Any
) -> Product:
    """dx [m, K] = dy [m, N] · weight [N, K]."""
    (n, k), dtype = weight.shape, rows.dtype
    spec = GemmSpec(m, k, n, rows, Operand(dtype, *weight.stride), Operand(dtype, k, 1), **more)
    given = {"x": dy, "w": "weight", "residual": "x"}
    return Product(spec, given, {"y": (name, shape, dtype)}, engine)


def weight_gradient(
    engine: str, dy: str, rows: Operand, x: str, other: Operand, m: int, n: int, k: int, bias: bool
) -> Product:
    """dw [N, K] = dy [m, N]ᵀ · x [m, K], and with `bias` db [N] = the sum of dy's rows."""
    dtype = rows.dtype
    turned = Operand(dtype, rows.columns, rows.rows)
    spec = GemmSpec(n, k, m, turned, other, Operand(dtype, k, 1), row_sum=dtype if bias else None)
    made = {"y": ("dw", (n, k), dtype)} | ({"row_sum": ("db", (n,), dtype)} if bias else {})
    return Product(spec, {"x": dy, "w": x}, made, engine)


def flat(t: TensorSpec, name: str) -> Operand | str:
    """A contiguous [..., columns] tensor as a matrix, or why it is none."""
    if not t.shape or 0 in t.shape:
        return f"{name} is empty"
    return Operand(t.dtype, t.shape[-1], 1) if wiring.is_contiguous(t) else f"{name} is not contiguous"


def matrices(*named: tuple[str, TensorSpec]) -> list[Operand] | str:
    """Each tensor as a matrix of evenly spaced rows, or why one is none."""
    found = []
    for name, t in named:
        if not t.shape or 0 in t.shape:
            return f"{name} is empty"
        operand = gemm_wiring.matrix(t)
        if operand is None:
            return f"{name}'s rows are not evenly spaced"
        found.append(operand)
    return found
