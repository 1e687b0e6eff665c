"""Element-wise ops by the flat and the tiled Triton kernels: one pass over memory, computed in float32."""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.elementwise import elementwise
from ...kernels.triton_runtime import device_math
from ..common import layouts as common_layouts
from . import shapes
from .definitions import FAMILY, POINTWISE_BACKWARD
from .shapes import Shape, backward_shape, forward_shape

ERF = ("gelu", "gelu_bwd")  # kinds with some 20 instructions an element


def configs(shape: Shape) -> list[dict[str, Any]]:
    """Configurations of a launch; for GELU by erf, which takes more registers, first of all two accesses a thread. What a backward pass
    reads again is not asked to leave level 2: forward and backward of 7 MB an operand on an H100 20.0 us, 23.1 if it is.

    An H200, 128 Mi: 4 warps for 2048 elements 128.4 us (f16), 128.3 (bf16), 8 warps 131.0 and 137.6; a copy 127.7.
    """
    _, outputs = elementwise.ELEMENTWISE[shape.kind]
    dtypes = [shape.dtype] * (len(shape.modes) + outputs)
    found = elementwise.elementwise_configs(
        dtypes, shape.rows, shape.columns, shape.modes, shape.steps
    )
    if shape.kept:
        found = [c for c in found if not c["stream"]]
    if shape.kind not in ERF:
        return found
    size = DTYPES[shape.dtype].itemsize
    return sorted(found, key=lambda c: c.get("BLOCK", 0) * size != 2 * 16 * 32 * c["num_warps"])


def _start(shape: Shape, config: Config, device: torch.device) -> Any:
    _, outputs = elementwise.ELEMENTWISE[shape.kind]
    dtypes = [shape.dtype] * (len(shape.modes) + outputs)
    return elementwise.elementwise_launcher(
        shape.kind, dtypes, shape.rows, shape.columns, shape.modes, dict(config), device, shape.align, shape.outer, shape.steps
    )  # fmt: skip


def build(shape: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher of one output."""
    start, empty = _start(shape, config, device), register.empty(device)
    out, stride, dtype = shape.out, shape.stride, DTYPES[shape.dtype]

    def launch(*given: torch.Tensor) -> Any:
        y = empty(out, stride, dtype)
        return (y,) if start(*given, y) else None

    return launch


def build_backward(described: tuple[str, Shape], config: Config, device: torch.device) -> Launcher:
    """A launcher over (dy, a, b, c, y)."""
    outputs = elementwise.ELEMENTWISE[described[1].kind][1]
    return shapes.backward_launcher(
        described, _start(described[1], config, device), outputs, device
    )


_SOURCES = (elementwise, device_math, common_layouts, shapes, sys.modules[__name__])
for _op in FAMILY:
    register.described(_op, "triton.flat", forward_shape, configs, build, _SOURCES)
register.described(
    POINTWISE_BACKWARD, "triton.flat", backward_shape, lambda d: configs(d[1]), build_backward, _SOURCES
)  # fmt: skip
