"""gelu_linear by a GELU pass and a product, cuBLASLt's or Triton's; backward by two products around one pass."""

from __future__ import annotations

from ...core.key import Key
from ...kernels import register
from ...kernels.elementwise import elementwise
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan
from ...kernels.reduce import contiguous
from . import GELU_LINEAR, GELU_LINEAR_BACKWARD, triton
from .triton import kind_of


def after(key: Key, engine: str) -> Plan | str:
    """A GELU pass over contiguous x, then one product."""
    return register.one_dtype(key) or layer_plans.after(
        key, engine, lambda: _pass(key, kind_of(key), ("x",), ("active",)), "active"
    )


def _pass(key: Key, kind: str, given: tuple[str, ...], names: tuple[str, ...]) -> Kernel:
    x = key.spec("x")
    assert x is not None
    return layer_plans.pointwise(kind, x.dtype, given, names, x.shape)


def backward(key: Key, engine: str) -> Plan | str:
    """dx = (dy · weight) · gelu'(x), dweight = dyᵀ · gelu(x): by Triton the gradient is in the epilogue, else one pass takes both."""
    needs, kind = key.flag("needs"), kind_of(key)

    def passes() -> list[Kernel]:
        if engine == "triton" or needs[0] == "0":
            return [_pass(key, kind, ("x",), ("active",))] if needs[1] == "1" else []
        if needs[1] == "1":
            return [_pass(key, f"{kind}_both", ("dactive", "x"), ("dx", "active"))]
        return [_pass(key, f"{kind}_bwd", ("dactive", "x"), ("dx",))]

    # Triton's epilogue takes the gradient without slowing the product
    epilogue = {"outer": "gradient", "kind": kind} if engine == "triton" else {}
    dx = "dx" if engine == "triton" else "dactive"
    return register.one_dtype(key) or layer_plans.gradients_around(
        key, engine, passes, dx, "active", **epilogue
    )


_PADDED, _SOURCES = ("cublaslt.padded", "triton.padded"), (elementwise, contiguous, triton)
gemm_register.add(
    GELU_LINEAR, after, "cublaslt.after_gelu", "triton.after_gelu", *_PADDED, sources=_SOURCES
)
gemm_register.add(GELU_LINEAR, triton.tiled, "triton.one_row")
gemm_register.add(
    GELU_LINEAR_BACKWARD, triton.tiled_backward, "triton.tiled", sources=(contiguous,)
)
gemm_register.add(
    GELU_LINEAR_BACKWARD, backward, "cublaslt.products", "triton.products", *_PADDED, sources=_SOURCES
)  # fmt: skip
