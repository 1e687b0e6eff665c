"""An extreme and its gradient as one op: whether a recorded call keeps where each line's extreme is, so that backward does not look for it, is
chosen by the time of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...core.op import Op
from ...kernels import register
from ..common import canonical_keys, costs, joint
from . import EXTREME_BACKWARD as BACKWARD
from . import MAX, MIN, Dims, extreme_backward, rounded_to_halves
from .shapes import left

# bytes of x, below which reading it again costs next to nothing
LEAST = 4 << 20
KINDS = {"max": MAX, "min": MIN}


def extreme_together(
    dy: Tensor, x: Tensor, dim: Dims, keepdim: bool, kind: str
) -> tuple[Tensor, ...]:
    """The largest ("max") or smallest ("min") value over dim, and its gradient with respect to x for the incoming gradient dy."""
    y = (torch.amax if kind == "max" else torch.amin)(x, dim, keepdim)
    return y, extreme_backward(dy, x, y, dim, keepdim)[0]


def both(key: Key) -> tuple[joint.Part, joint.Part]:
    """Forward and backward with their keys."""
    dy, x = key.tensors
    flags = tuple(f for f in key.flags if f[0] != "kind")
    return (
        joint.part(KINDS[key.flag("kind")], {"x": x}, (*flags, ("save", True)), key.device),
        joint.part(BACKWARD, {"dy": dy, "x": x, "y": dy}, flags, key.device),
    )


def _whole(key: Key, kind: str) -> joint.Part | None:
    """The key of an extreme that is large, over some dimensions, and of which what is left lies in x's order."""
    x, dims = key.present("x"), key.flag("dim")
    if not dims or 0 in x.shape or x.dtype not in ("f16", "bf16", "f32") or costs.nbytes(x) < LEAST:
        return None
    kept = [s for d, (n, s) in enumerate(zip(x.shape, x.stride, strict=True)) if n > 1 and d not in dims]  # fmt: skip
    if kept != sorted(kept, reverse=True) or 0 in kept:
        return None
    shape = left(key)
    flags = tuple(f for f in key.flags if f[0] != "save")
    dy = TensorSpec(x.dtype, shape, register.contiguous(shape))
    return joint.part(TOGETHER, {"dy": dy, "x": x}, (*flags, ("kind", kind)), key.device)


def _behind(key: Key) -> joint.Part | None:
    """As of a maximum: the backward key does not say of which extreme."""
    dy = key.spec("dy")
    return _whole(key, "max") if dy is not None and register.is_contiguous(dy) else None


def _alike(key: Key) -> Key:
    """A minimum is as long in the making as a maximum."""
    flags = tuple((n, "max" if n == "kind" else v) for n, v in key.flags)
    return canonical_keys.reduced(replace(key, flags=flags))


def _reads(dy: Tensor, given: Any, outs: Any) -> tuple[Any, ...]:
    return dy, *given, outs[0]


def _cases() -> Any:
    for kind in KINDS:
        for shape, dim in (((7,), (0,)), ((33, 65), (1,)), ((33, 65), (0,)), ((2, 3, 5), (1,))):
            x = torch.randn(shape).mul(2).round()
            yield torch.randn(x.sum(dim).shape), x, dim, False, kind
        yield torch.randn(3, 1, 5), torch.randn(3, 4, 5), (1,), True, kind


def _traffic(key: Key) -> float:
    x = key.present("x")
    return 2 * costs.inputs(key) + costs.size(x) * DTYPES[x.dtype].itemsize


TOGETHER = Op(
    reference=extreme_together,
    flops=lambda key: 4.0 * costs.size(key.spec("x")),
    traffic=_traffic,
    normal=_alike,
    cases=_cases,
    stress=rounded_to_halves,
    outputs=2,
    internal=True,
    stands_for=("max", "min", "extreme_backward"),
)
joint.candidates(TOGETHER, extreme_together, both, _reads)
of_forward = joint.of_forward(lambda key: _whole(key, key.op))
of_backward = joint.of_backward(_behind)
MAX.joined = MIN.joined = of_forward
BACKWARD.twins = of_backward
