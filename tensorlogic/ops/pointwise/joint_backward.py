"""A ReLU and its gradient as one op: whether a recorded call marks where its output is above 0, for backward to read instead of the
output, is chosen by the time of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.key import Key, TensorSpec
from ...core.op import Op
from ...kernels import register
from ..common import canonical_keys, costs, joint
from ..common import layouts as common_layouts
from .definitions import ADD_RELU, RELU
from .definitions import POINTWISE_BACKWARD as BACKWARD

# bytes of an output, below which reading it again costs next to nothing
LEAST = 4 << 20
KINDS = {"relu": RELU, "add_relu": ADD_RELU}


def pointwise_together(dy: Tensor, a: Tensor, b: Tensor | None, kind: str) -> tuple[Tensor, ...]:
    """relu(a) or relu(a + b), and its gradient with respect to each operand for the incoming gradient dy."""
    y = torch.relu(a if b is None else a + b)
    return y, torch.ops.aten.threshold_backward(dy, y, 0)


def both(key: Key) -> tuple[joint.Part, joint.Part]:
    """Forward and backward with their keys."""
    dy, a, b = key.tensors
    kind = key.flag("kind")
    given = {"x": a} if b is None else {"a": a, "b": b}
    flags = (("kind", kind), ("needs", "100" if b is None else "110"))
    reads = {"dy": dy, "a": None, "b": None, "c": None, "y": a}
    return (
        joint.part(KINDS[kind], given, (("save", True),), key.device),
        joint.part(BACKWARD, reads, flags, key.device),
    )


def _whole(key: Key, kind: str, *names: str) -> joint.Part | None:
    """The joined key where the named tensors look alike, lie without gaps, at multiples of 16 bytes, and are large."""
    found = [t for t in map(key.spec, names) if t is not None]
    looks = {(t.dtype, t.shape, t.stride, t.align) for t in found}
    one = TensorSpec(*looks.pop())
    if looks or one.align < 16 or costs.nbytes(one) < LEAST or register.one_dtype(key, *names):
        return None
    if not common_layouts.dense((one.shape, one.stride)):
        return None
    tensors = {"dy": one, "a": one, "b": one if kind == "add_relu" else None}
    return joint.part(TOGETHER, tensors, (("kind", kind),), key.device)


def _behind(key: Key) -> joint.Part | None:
    kind, given = key.flag("kind"), {n for n in key.names if key.spec(n) is not None}
    served = kind in KINDS and given == {"dy", "y"}
    return _whole(key, kind, "dy", "y") if served else None


def _reads(dy: Tensor, given: Any, outs: Any) -> tuple[Any, ...]:
    return dy, None, None, None, outs[0]


def _cases() -> Any:
    for shape in ((7,), (33, 65), (0, 4), ()):
        yield torch.randn(shape), torch.randn(shape), None, "relu"
        yield torch.randn(shape), torch.randn(shape), torch.randn(shape), "add_relu"


TOGETHER = Op(
    reference=pointwise_together,
    flops=lambda key: 3.0 * costs.size(key.tensors[0]),
    traffic=lambda key: 2 * costs.inputs(key),
    elementwise=True,
    normal=canonical_keys.one_line,
    cases=_cases,
    outputs=2,
    internal=True,
    stands_for=("relu", "add_relu", "pointwise_backward"),
)
joint.candidates(TOGETHER, pointwise_together, both, _reads)
of_forward = joint.of_forward(lambda key: _whole(key, key.op, *key.names))
of_backward = joint.of_backward(_behind)
RELU.joined = ADD_RELU.joined = of_forward
BACKWARD.twins = of_backward
