"""relu and add_relu whose forward pass leaves a bit an element for the gradient."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...kernels import register
from ...kernels.elementwise import relu_mask
from ...kernels.triton_runtime import device_math, launch_plan
from ..common import layouts as common_layouts
from .joint_backward import TOGETHER, both


def describe(key: Key) -> TensorSpec | str:
    """What all operands look like."""
    dy, a, b = key.present("dy"), key.spec("a"), key.spec("b")
    if any(t is not None and (t.shape, t.stride) != (dy.shape, dy.stride) for t in (a, b)):
        return "an operand lies otherwise"
    if 0 in dy.shape or not common_layouts.dense((dy.shape, dy.stride)):
        return "empty, or with gaps"
    reason = register.one_dtype(key)
    return reason or ("an operand is not aligned to 16 bytes" if register.weakest(key) < 16 else dy)


def configs(one: TensorSpec) -> list[dict[str, Any]]:
    """Configurations, best guess first."""
    return relu_mask.marked_configs(one.dtype)


def forward(one: TensorSpec, adds: bool, config: Config, device: torch.device) -> Launcher:
    """(a) or (a, b) -> (y, marks)."""
    count, dtype = prod(one.shape), DTYPES[one.dtype]
    start = relu_mask.marked_launcher(one.dtype, count, adds, dict(config), device)
    empty, (shape, stride) = register.empty(device), common_layouts.iterated((one.shape, one.stride))  # fmt: skip
    space = (relu_mask.marks(count),)

    def two(a: Tensor, b: Tensor) -> Any:
        y, mark = empty(shape, stride, dtype), empty(space, (1,), torch.uint8)
        return (y, mark) if start(a, b, y, mark) else None

    def alone(a: Tensor) -> Any:
        y, mark = empty(shape, stride, dtype), empty(space, (1,), torch.uint8)
        return (y, mark) if start(a, y, mark) else None

    return two if adds else alone


class Settling:
    """(incoming gradient, marks) -> the gradient."""

    def __init__(self, one: TensorSpec, config: Config, device: torch.device) -> None:
        self.shape, self.stride = common_layouts.iterated((one.shape, one.stride))
        self.dtype, self.count, self.empty = DTYPES[one.dtype], prod(one.shape), register.empty(device)  # fmt: skip
        self.many, self.single = (
            relu_mask.unmarked_launcher(one.dtype, self.count, n, dict(config), device)
            for n in (False, True)
        )

    def __call__(self, dy: Tensor, mark: Tensor) -> Tensor:
        dx, start = self.empty(self.shape, self.stride, self.dtype), self.many
        if not any(dy.stride()) and self.count > 1:  # the gradient of a sum
            start = self.single
        elif not self._alike(dy):
            dy = self.empty(self.shape, self.stride, self.dtype).copy_(dy)
        if not (start(dy, mark, dx) or start(dy.clone(), mark.clone(), dx)):  # at aligned addresses
            raise RuntimeError(f"relu: a gradient of {list(self.shape)} could not be started")
        return dx

    def _alike(self, dy: Tensor) -> bool:
        """Whether it lies as the output does, dimensions of size 1 aside."""
        pairs = zip(self.shape, dy.stride(), self.stride, strict=True)
        return all(n == 1 or s == own for n, s, own in pairs)

    def output(self, mark: Tensor) -> Tensor:
        """1 where the output is above 0, else 0, laid out as it is."""
        above = (mark[:, None] >> torch.arange(8, device=mark.device)) & 1
        flat = above.view(-1)[: self.count].to(self.dtype)
        return flat.as_strided(self.shape, self.stride)


def build(one: TensorSpec, config: Config, device: torch.device) -> Launcher:
    """Output and gradient, one after the other."""
    ahead = {adds: forward(one, adds, config, device) for adds in (False, True)}
    settle = Settling(one, config, device)

    def launch(dy: Tensor, a: Tensor, b: Tensor | None) -> Any:
        outs = ahead[False](a) if b is None else ahead[True](a, b)
        if outs is None:
            return None
        y, mark = outs
        assert mark is not None
        return y, settle(dy, mark)

    return launch


def parts(key: Key, config: Config, device: torch.device) -> tuple[Launcher, Callable[..., Tensor]]:
    """Forward, replayed in C, and what makes the gradient of its marks."""
    one = describe(key)
    if isinstance(one, str):
        raise ValueError(f"{key.text} is not served in one: {one}")
    (op, ahead), _ = both(key)
    start = forward(one, key.spec("b") is not None, config, device)
    return launch_plan.plan(op, ahead, device, start), Settling(one, config, device)


_SOURCES = (relu_mask, device_math, common_layouts, sys.modules[__name__])
register.described(TOGETHER, "triton.marked", describe, configs, build, _SOURCES, parts=parts)
