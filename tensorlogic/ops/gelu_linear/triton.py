"""gelu_linear by one product, the GELU applied to tiles of x on their way to the tensor cores."""

from __future__ import annotations

from ...core.key import Key
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Plan
from . import GELU_LINEAR

FEW_ROWS = 16  # up to which there are few enough tiles at any size


def kind_of(key: Key) -> str:
    """The name of the key's GELU."""
    return "gelu_tanh" if key.flag("approximate") == "tanh" else "gelu"


def describe(key: Key, engine: str = "triton") -> Plan | str:
    """The GELU in the product's prologue, at any size."""
    return layer_plans.layer(key, engine, prologue="activation", kind=kind_of(key))


def tiled(key: Key, engine: str) -> Plan | str:
    """The same where tiles are few enough to take the GELU of an element again and again."""
    return layer_plans.small(key, describe(key, engine), "GELU", FEW_ROWS)


def tiled_backward(key: Key, engine: str) -> Plan | str:
    """dx = (dy · weight) · gelu'(x) in the epilogue; dweightᵀ = gelu(x)ᵀ · dy with the GELU in the prologue."""
    kind = kind_of(key)
    outer, prologue = {"outer": "gradient", "kind": kind}, {"prologue": "activation", "kind": kind}
    return layer_plans.small(key, layer_plans.tiled_gradients(key, outer, prologue), "GELU")


gemm_register.add(GELU_LINEAR, tiled, "triton.tiled")
