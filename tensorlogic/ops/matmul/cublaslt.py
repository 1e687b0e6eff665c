"""matmul's gradients as two products, cuBLASLt's or Triton's; an activation's gradient is a pass of its own before them."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.elementwise import elementwise
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan, Product
from ...kernels.gemm.spec import GemmSpec, Operand
from . import MATMUL, MATMUL_BACKWARD, triton
from .triton import describe, operand, operands


def _folded(dz: TensorSpec, a: TensorSpec, b: TensorSpec) -> tuple[int, int, list[Operand]] | str:
    """(batches, rows of each, dz, a and b as matrices), or why they are none."""
    if len(b.shape) == 2:
        found = layer_plans.matrices(("dy", dz), ("a", a))
        return found if isinstance(found, str) else (1, prod(a.shape[:-1]), [*found, operand(b)])
    lead = b.shape[:-2]
    if a.shape[:-2] != lead:
        return "a gradient is summed over broadcast batch dimensions"
    found = operands(lead, dz, a, b)
    return found if isinstance(found, str) else (prod(lead), a.shape[-2], found)


def backward(key: Key, engine: str = "triton") -> Plan | str:
    """da = dz · bᵀ and db = aᵀ · dz, with dz = dy · act'(kept)."""
    dy, a, b, kept = key.tensors
    assert dy is not None and a is not None and b is not None
    needs, activation, dtype = key.flag("needs"), key.flag("activation"), dy.dtype
    reason = register.one_dtype(key)
    if reason is not None:
        return reason
    if len(a.shape) < 2 or len(b.shape) < 2:
        return "a vector"
    if 0 in (*a.shape, *b.shape):
        return "empty"
    steps, dz, spec = list[Kernel | Product](), "dy", dy
    if activation != "none":
        if kept is None or not (register.is_contiguous(dy) and register.is_contiguous(kept)):
            return "dy or the kept tensor is not contiguous"
        dz, spec = "dz", replace(dy, stride=register.contiguous(dy.shape))
        kind, given = f"{activation}_bwd", ("dy", "kept")
        steps.append(layer_plans.pointwise(kind, dtype, given, ("dz",), dy.shape))
    found = _folded(spec, a, b)
    if isinstance(found, str):
        return found
    (batch, m, (rows, left, right)), (k, n) = found, b.shape[-2:]

    def whole(count: int, columns: int) -> Operand:
        return Operand(dtype, columns, 1, count * columns if batch > 1 else 0)

    def turned(operand: Operand) -> Operand:
        return replace(operand, rows=operand.columns, columns=operand.rows)

    if needs[0] == "1":
        product = GemmSpec(m, k, n, rows, turned(right), whole(m, k), batch=batch)
        steps.append(Product(product, {"x": dz, "w": "b"}, {"y": ("da", a.shape, dtype)}, engine))
    if needs[1] == "1":
        product = GemmSpec(k, n, m, turned(left), rows, whole(k, n), batch=batch)
        steps.append(Product(product, {"x": "a", "w": dz}, {"y": ("db", b.shape, dtype)}, engine))
    return layer_plans.asked(steps, ("da", "db"), needs)


gemm_register.add(MATMUL, describe, "cublaslt.epilogue", "cublaslt.padded", "triton.one_row")
gemm_register.add(
    MATMUL_BACKWARD, backward, "cublaslt.products", "triton.products", "cublaslt.padded", "triton.padded", sources=(elementwise, triton)
)  # fmt: skip
