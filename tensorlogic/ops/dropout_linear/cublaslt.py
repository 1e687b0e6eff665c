"""dropout_linear by a pass that draws the mask and a product, cuBLASLt's or Triton's; backward draws it again, in passes around two."""

from __future__ import annotations

from math import prod
from typing import Any

import torch

from ...core.key import Key
from ...kernels.elementwise import dropout
from ...kernels.gemm import layer_plans
from ...kernels.gemm import register as gemm_register
from ...kernels.gemm.bind import Kernel, Plan, Start
from ...kernels.reduce import contiguous
from . import DROPOUT_LINEAR, DROPOUT_LINEAR_BACKWARD, triton
from .triton import returned


def _dropped(key: Key, given: str, name: str) -> Kernel:
    """`name` = dropout of contiguous `given`, which has x's shape."""
    x, seeded = key.spec("x"), key.spec("state") is None
    assert x is not None
    dtype, shape = x.dtype, x.shape

    def build(config: dict[str, Any], device: torch.device, align: int) -> Start:
        return dropout.dropout_launcher(dtype, prod(shape), seeded, config, device, align)

    drawn = (name, "p", "seed", "offset") if seeded else ("state", name, "p")
    return Kernel((given, *drawn), {name: (name, shape, dtype)}, dropout.CONFIGS, build)


def after(key: Key, engine: str) -> Plan | str:
    """A dropout pass over contiguous x, then one product."""
    found = layer_plans.after(key, engine, lambda: _dropped(key, "x", "dropped"), "dropped")
    return returned(key, found)


def backward(key: Key, engine: str) -> Plan | str:
    """dx = dropout(dy · weight), dweight = dyᵀ · dropout(x), dbias = column sums of dy."""
    if key.spec("mask") is not None:
        return "forward kept a mask of PyTorch's"
    named = zip((("dropped_dx", "dx"), ("x", "dropped")), key.flag("needs"), strict=False)
    wanted = [names for names, need in named if need == "1"]
    return layer_plans.gradients_around(
        key, engine, lambda: [_dropped(key, *names) for names in wanted], "dropped_dx", "dropped"
    )


_IDS = ("triton.after_dropout", "triton.padded", "cublaslt.after_dropout", "cublaslt.padded")
_SOURCES = (dropout, contiguous, triton)
gemm_register.add(DROPOUT_LINEAR, after, *_IDS, sources=_SOURCES)
gemm_register.add(
    DROPOUT_LINEAR_BACKWARD, triton.tiled_backward, "triton.tiled", sources=(contiguous,)
)
gemm_register.add(DROPOUT_LINEAR_BACKWARD, backward, *_IDS, sources=_SOURCES)
