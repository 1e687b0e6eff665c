"""relu and add_relu whose forward pass leaves a bit an element for the gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...numerics import DTYPES
from ...op import Config, Launcher
from ...plans import Key, TensorSpec
from ..common import compiled_launch, triton_marked, triton_math, wiring
from .together import TOGETHER, both, dense


def describe(key: Key) -> TensorSpec | str:
    """What all operands look like."""
    dy, a, b = key.tensors
    assert dy is not None
    if any(t is not None and (t.shape, t.stride) != (dy.shape, dy.stride) for t in (a, b)):
        return "an operand lies otherwise"
    if not dense(dy):
        return "empty, or with gaps"
    reason = wiring.one_dtype(key)
    return reason or ("an operand is not aligned to 16 bytes" if wiring.weakest(key) < 16 else dy)


def configs(one: TensorSpec) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return triton_marked.marked_configs(one.dtype)


def forward(one: TensorSpec, adds: bool, config: Config, device: torch.device) -> Launcher:
    """(a) or (a, b) -> (y, marks)."""
    count, dtype = prod(one.shape), DTYPES[one.dtype]
    start = triton_marked.marked_launcher(one.dtype, count, adds, dict(config), device)
    empty, shape, stride = wiring.empty(device), one.shape, one.stride
    space = (triton_marked.marks(count),)

    def two(a: Tensor, b: Tensor) -> Any:
        y, mark = empty(shape, stride, dtype), empty(space, (1,), torch.uint8)
        return (y, mark) if start(a, b, y, mark) else None

    def alone(a: Tensor) -> Any:
        y, mark = empty(shape, stride, dtype), empty(space, (1,), torch.uint8)
        return (y, mark) if start(a, y, mark) else None

    return two if adds else alone


def settling(one: TensorSpec, config: Config, device: torch.device) -> Callable[..., Tensor]:
    """(incoming gradient, marks) -> the gradient."""
    count, dtype = prod(one.shape), DTYPES[one.dtype]
    many, single = (
        triton_marked.unmarked_launcher(one.dtype, count, n, dict(config), device)
        for n in (False, True)
    )
    empty, shape, stride = wiring.empty(device), one.shape, one.stride

    def settle(dy: Tensor, mark: Tensor) -> Tensor:
        dx = empty(shape, stride, dtype)
        start = many
        if dy.stride() != stride:
            if any(dy.stride()):
                dy = empty(shape, stride, dtype).copy_(dy)
            else:  # the gradient of a sum
                start = single
        if start(dy, mark, dx) or start(dy.clone(), mark, dx):  # at an aligned address
            return dx
        raise RuntimeError(
            f"relu: what was kept of outputs {list(shape)} for backward has been moved to unaligned memory; leave it where it was, or "
            f"compute under tensorlogic.policy(force='triton.flat')"
        )

    return settle


def build(one: TensorSpec, config: Config, device: torch.device) -> Launcher:
    """Output and gradient, one after the other."""
    ahead = {adds: forward(one, adds, config, device) for adds in (False, True)}
    settle = settling(one, config, device)

    def launch(dy: Tensor, a: Tensor, b: Tensor | None) -> Any:
        outs = ahead[False](a) if b is None else ahead[True](a, b)
        return None if outs is None else (outs[0], settle(dy, outs[1]))

    return launch


def parts(key: Key, config: Config, device: torch.device) -> tuple[Launcher, Callable[..., Tensor]]:
    """Forward, replayed in C, and what makes the gradient of its marks."""
    one = describe(key)
    if isinstance(one, str):
        raise ValueError(f"{key.text} is not served in one: {one}")
    (op, ahead), _ = both(key)
    start = forward(one, key.spec("b") is not None, config, device)
    return compiled_launch.plan(op, ahead, device, start), settling(one, config, device)


wiring.described(
    TOGETHER,
    "triton.marked",
    describe,
    configs,
    build,
    (triton_marked, triton_math, sys.modules[__name__]),
    parts=parts,
)
