"""dropout_linear by one product, the mask drawn for each tile of x where it is used, and again in backward."""

from __future__ import annotations

from dataclasses import replace

from ...core.key import Key
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Plan
from . import DROPOUT_LINEAR

# what a kernel that draws a mask is passed
NUMBERS = {"seed": "state", "p": "p", "seed_value": "seed", "offset_value": "offset"}


def returned(key: Key, found: Plan | str) -> Plan | str:
    """The plan with the mask's place among its outputs, which is empty."""
    if key.flag("save") and isinstance(found, Plan):
        return replace(found, returns=("y", "None"))
    return found


def tiled(key: Key, engine: str) -> Plan | str:
    """One product, the mask drawn for each tile of x where it is used."""
    seeded = key.spec("state") is None
    found = layer_plans.layer(key, engine, NUMBERS, prologue="dropout", seeded=seeded)
    return returned(key, found)


def tiled_backward(key: Key, engine: str) -> Plan | str:
    """dx = dropout(dy · weight) in the epilogue; dweightᵀ = dropout(x)ᵀ · dy in the prologue."""
    if key.spec("mask") is not None:
        return "forward kept a mask of PyTorch's"
    seeded = {"seeded": key.spec("state") is None}
    outer, prologue = {"outer": "dropout", **seeded}, {"prologue": "dropout", **seeded}
    return layer_plans.tiled_gradients(key, outer, prologue, NUMBERS)


gemm_register.add(DROPOUT_LINEAR, tiled, "triton.tiled")
