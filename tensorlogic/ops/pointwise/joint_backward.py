"""A ReLU and its gradient as one op: whether a recorded call marks where its output is above 0, for backward to read instead of the
output, is chosen by the time of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import EAGER, Candidate, Config, Launcher
from ...core.key import Key, TensorSpec
from ...core.op import Op
from ...kernels import register
from ...system import hardware
from ..common import canonical_keys, costs, separate_pair
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


def both(key: Key) -> tuple[tuple[Op, Key], tuple[Op, Key]]:
    """Forward and backward with their keys."""
    dy, a, b = key.tensors
    kind = key.flag("kind")
    forward = Key(
        op=kind,
        tensors=(a,) if b is None else (a, b),
        names=("x",) if b is None else ("a", "b"),
        flags=(("save", True),),
        device=key.device,
        direction="forward",
    )
    backward = Key(
        op=BACKWARD.name,
        tensors=(dy, None, None, None, a),
        names=("dy", "a", "b", "c", "y"),
        flags=(("kind", kind), ("needs", "100" if b is None else "110")),
        device=key.device,
        direction="backward",
    )
    return (KINDS[kind], forward), (BACKWARD, backward)


def _whole(kind: str, one: TensorSpec, device: str) -> tuple[Op, Key]:
    """The key of operands that all look like `one`."""
    return TOGETHER, Key(
        op=TOGETHER.name,
        tensors=(one, one, one if kind == "add_relu" else None),
        names=("dy", "a", "b"),
        flags=(("kind", kind),),
        device=device,
        direction="backward",
    )


def _alike(key: Key, *names: str) -> TensorSpec | None:
    """What the named tensors look like, where they look alike, lie without gaps, at multiples of 16 bytes, and are large."""
    found = [t for t in map(key.spec, names) if t is not None]
    looks = {(t.dtype, t.shape, t.stride, t.align) for t in found}
    one = TensorSpec(*looks.pop())
    if looks or one.align < 16 or costs.nbytes(one) < LEAST or register.one_dtype(key, *names):
        return None
    return one if common_layouts.dense((one.shape, one.stride)) else None


def of_forward(key: Key) -> tuple[Op, Key] | None:
    """A recorded key with its backward pass, on a device that has a candidate which makes both."""
    able = key.device == "cuda" or hardware.interpreting()
    one = _alike(key, *key.names) if able and key.flag("save") else None
    return None if one is None else _whole(key.op, one, key.device)


def of_backward(key: Key) -> Iterable[tuple[Op, Key]]:
    """As `of_forward`, from the backward key: measured after it, so that what it is compared with is known."""
    kind, given = key.flag("kind"), {n for n in key.names if key.spec(n) is not None}
    if key.device == "cuda" and kind in KINDS and given == {"dy", "y"}:
        one = _alike(key, "dy", "y")
        if one is not None:
            yield _whole(kind, one, key.device)


def _bind_apart(key: Key, config: Config, device: torch.device) -> Launcher:
    """Forward and backward as each of them is chosen."""
    adds = key.spec("b") is not None

    def way(ahead: Any, back: Any) -> Launcher:
        forward, backward = ahead.launch, back.launch

        def launch(dy: Tensor, a: Tensor, b: Tensor | None) -> Any:
            outs = forward(a, b) if adds else forward(a)
            if outs is None:
                return None
            grads = backward(dy, None, None, None, outs[0])
            return None if grads is None else (outs[0], grads[0])

        return launch

    return separate_pair.launcher(both(key), device, way)


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
TOGETHER.candidate(EAGER, trusted=True)(pointwise_together)
TOGETHER.add(Candidate("chosen.apart", bind=_bind_apart, sources=(_bind_apart,), trusted=True))
RELU.joined = ADD_RELU.joined = of_forward
BACKWARD.twins = of_backward
