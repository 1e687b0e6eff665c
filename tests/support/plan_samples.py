"""Keys, plans and environments that the tests of plans use."""

from __future__ import annotations

from typing import Any

import torch

from tensorlogic.core.key import Key, TensorSpec
from tensorlogic.plans.environment import Environment
from tensorlogic.plans.plan import Evidence, Plan

CPU = Environment("Test CPU 9000", "cpu", "AVX2", "2.13.0+cpu", None, (), threads=2)
GPU = Environment("NVIDIA H200", "cuda", "580.1", "2.11.0+cu130", "3.6.0", ("nvidia-cublas 13.1",))


def spec(*shape: int, dtype: str = "f16", stride: tuple[int, ...] = (), **more: Any) -> TensorSpec:
    return TensorSpec(dtype, shape, stride or torch.empty(shape, device="meta").stride(), **more)


def linear(m: int, k: int, n: int, **more: Any) -> Key:
    fields: dict[str, Any] = {
        "op": "linear",
        "tensors": (spec(m, k), spec(n, k, constant=True), None),
        "names": ("x", "weight", "residual"),
        "flags": (("activation", "relu"),),
        "device": "cpu",
        "direction": "inference",
        "precision": "default",
    }
    return Key(**{**fields, **more})


def plan(key: Key, winner: str = "triton.tiled", **more: Any) -> Plan:
    fields: dict[str, Any] = {
        "eager": winner,
        "eager_config": {"BLOCK": (16, 32), "warps": 4},
        "captured": winner,
        "captured_config": {},
        "evidence": [
            Evidence("torch.eager", {}, "measured", 5.0, 6.0, 0.01, 1.0, "2 times", "e0"),
            Evidence(winner, {}, "measured", 2.0, 3.0, 0.01, 0.9, "chosen", "s0"),
            Evidence("cpu.bad", {}, "refused", reason="wrong: row 3", source="b0"),
        ],
        "versions": {"torch": "2.13.0"},
        "measured": "2026-11-20T10:00:00+00:00",
    }
    return Plan(key, **{**fields, **more})


def anything(candidate: str) -> bool:
    """Every candidate is allowed."""
    return True
