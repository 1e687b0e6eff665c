"""Products under a precision policy as one launcher of allocations and kernels: within an error budget, their judge among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core.candidate import Config, Launcher, Outputs
from ..core.dtypes import NAMES
from ..core.key import Key
from ..core.op import Op
from ..kernels import register
from ..kernels.mixed_precision import split_planes
from ..kernels.mixed_precision.guard_recompute import Watch
from ..kernels.triton_runtime import launch_plan
from . import number_formats
from .cublaslt_sequence import flag
from .product_sites import Place, alone, sited


def launcher(
    op: Op, key: Key, device: torch.device, way: tuple[str, Config],
    products: Sequence[tuple[Tensor, Tensor, Tensor]], places: Sequence[Place], outs: Outputs, watch: Watch | None,
) -> Launcher | None:  # fmt: skip
    """What serves calls that look like the one of these products, places and outputs, replayed in C where that can be; None
    where more is to be done than to allocate and start kernels."""
    found, rank = number_formats.WAYS.get(way[0]), int(way[1].get("rank", 0))
    if found is None or found.run is None or sum(out is not None for out in outs) != len(places):
        return None
    if any(out is not None and out.dim() != 2 for out in outs):
        return None
    runs = [found.run(left, right, rank) for left, right, _ in products]
    ends = [_rounded(out, device) for _, _, out in products]

    def launch(*given: Any) -> Outputs:
        made: list[Tensor | None] = [None] * len(outs)
        judged = []
        for place, run, end in zip(places, runs, ends, strict=True):
            assert run is not None
            left, right = given[place.left], given[place.right]
            y = made[place.out] = end(run(left, right))
            judged.append((left, right, y))
        if watch is not None:
            watch.judge(judged)
        return tuple(made)

    return None if None in runs else launch_plan.plan(op, key, device, launch)


class Quick:
    """`launch`, a candidate's composition of products; from the second call on without it, where they are all there is."""

    def __init__(
        self, op: Op, key: Key, config: Config, device: torch.device, id: str, launch: Launcher
    ) -> None:
        self.op, self.key, self.device = op, key, device
        self.way, self.launch = (id, config), launch
        self.quick: Launcher | None = None
        self.tried = not alone(key)

    def __call__(self, *dynamic: Any) -> Outputs | None:
        quick = self.quick
        if quick is not None and (outs := quick(*dynamic)) is not None:
            return outs
        outs = self.launch(*dynamic)
        # a kernel that is loaded while a graph is captured would spoil it
        if not self.tried and outs is not None and split_planes.stream(self.device) >= 0:
            self.tried = True
            found = sited(self.op, self.key, dynamic, outs)
            about = (self.op, self.key, self.device, self.way)
            self.quick = None if found is None else launcher(*about, *found, outs, None)
        return outs


def _rounded(out: Tensor, device: torch.device) -> Callable[[Tensor], Tensor]:
    """A matrix in float32 in the dtype of this one."""
    if out.dtype == torch.float32:
        return _same
    shape, strides = (out.shape[0], out.shape[1]), (out.shape[1], 1)
    planes = (shape, strides, (0,), False)
    start = split_planes._split(("f32", NAMES[out.dtype]), (planes,), 0, 16, device)
    return partial(_into, start, register.empty(device), shape, strides, out.dtype, device)


def _same(y: Tensor) -> Tensor:
    return y


def _into(
    start: Any, empty: Any, shape: Any, strides: Any, dtype: torch.dtype, device: torch.device, y: Tensor
) -> Tensor:  # fmt: skip
    rounded: Tensor = empty(shape, strides, dtype)
    if not start(y, rounded, flag(device)):
        raise RuntimeError("watched: the kernel refused fresh memory")
    return rounded
