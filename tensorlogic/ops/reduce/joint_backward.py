"""An extreme and its gradient as one op: whether a recorded call keeps where each line's extreme is, so that backward does not look for it, is
chosen by the time of both."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import EAGER, Candidate, Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key, TensorSpec
from ...core.op import Op
from ...kernels import register
from ...system import hardware
from ..common import canonical_keys, costs, separate_pair
from . import EXTREME_BACKWARD as BACKWARD
from . import MAX, MIN, extreme_backward

# bytes of x, below which reading it again costs next to nothing
LEAST = 4 << 20
KINDS = {"max": MAX, "min": MIN}
Dims = tuple[int, ...]


def extreme_together(
    dy: Tensor, x: Tensor, dim: Dims, keepdim: bool, kind: str
) -> tuple[Tensor, ...]:
    """The largest ("max") or smallest ("min") value over dim, and its gradient with respect to x for the incoming gradient dy."""
    y = (torch.amax if kind == "max" else torch.amin)(x, dim, keepdim)
    return y, extreme_backward(dy, x, y, dim, keepdim)[0]


def rest(key: Key) -> tuple[int, ...]:
    """The output's shape."""
    x, dims, keep = key.spec("x"), key.flag("dim"), key.flag("keepdim")
    assert x is not None
    return tuple(1 if d in dims else n for d, n in enumerate(x.shape) if keep or d not in dims)


def both(key: Key) -> tuple[tuple[Op, Key], tuple[Op, Key]]:
    """Forward and backward with their keys."""
    dy, x = key.tensors
    flags = tuple(f for f in key.flags if f[0] != "kind")
    kind = key.flag("kind")
    forward = Key(
        op=kind,
        tensors=(x,),
        names=("x",),
        flags=(*flags, ("save", True)),
        device=key.device,
        direction="forward",
    )
    backward = Key(
        op=BACKWARD.name,
        tensors=(dy, x, dy),
        names=("dy", "x", "y"),
        flags=flags,
        device=key.device,
        direction="backward",
    )
    return (KINDS[kind], forward), (BACKWARD, backward)


def _whole(key: Key, kind: str) -> tuple[Op, Key] | None:
    """The key of an extreme that is large, over some dimensions, and of which what is left lies in x's order."""
    x, dims = key.spec("x"), key.flag("dim")
    assert x is not None
    if not dims or 0 in x.shape or x.dtype not in ("f16", "bf16", "f32") or costs.nbytes(x) < LEAST:
        return None
    kept = [s for d, (n, s) in enumerate(zip(x.shape, x.stride, strict=True)) if n > 1 and d not in dims]  # fmt: skip
    if kept != sorted(kept, reverse=True) or 0 in kept:
        return None
    shape = rest(key)
    flags = tuple(f for f in key.flags if f[0] != "save")
    return TOGETHER, Key(
        op=TOGETHER.name,
        tensors=(TensorSpec(x.dtype, shape, register.contiguous(shape)), x),
        names=("dy", "x"),
        flags=(*flags, ("kind", kind)),
        device=key.device,
        direction="backward",
    )


def of_forward(key: Key) -> tuple[Op, Key] | None:
    """A recorded key with its backward pass, on a device that has a candidate which makes both."""
    able = key.device == "cuda" or hardware.interpreting()
    return _whole(key, key.op) if able and key.flag("save") else None


def of_backward(key: Key) -> Iterable[tuple[Op, Key]]:
    """As `of_forward`, from the backward key, which does not say of which extreme: measured after it, so that what it is compared with is
    known."""
    dy = key.spec("dy")
    whole = _whole(key, "max") if key.device == "cuda" else None
    if whole is not None and dy is not None and register.is_contiguous(dy):
        yield whole


def _alike(key: Key) -> Key:
    """A minimum is as long in the making as a maximum."""
    flags = tuple((n, "max" if n == "kind" else v) for n, v in key.flags)
    return canonical_keys.reduced(replace(key, flags=flags))


def _bind_apart(key: Key, config: Config, device: torch.device) -> Launcher:
    """Forward and backward as each of them is chosen."""

    def way(ahead: Any, back: Any) -> Launcher:
        forward, backward = ahead.launch, back.launch

        def launch(dy: Tensor, x: Tensor) -> Any:
            outs = forward(x)
            if outs is None:
                return None
            grads = backward(dy, x, outs[0])
            return None if grads is None else (outs[0], grads[0])

        return launch

    return separate_pair.launcher(both(key), device, way)


def _cases() -> Any:
    for kind in KINDS:
        for shape, dim in (((7,), (0,)), ((33, 65), (1,)), ((33, 65), (0,)), ((2, 3, 5), (1,))):
            x = torch.randn(shape).mul(2).round()
            yield torch.randn(x.sum(dim).shape), x, dim, False, kind
        yield torch.randn(3, 1, 5), torch.randn(3, 4, 5), (1,), True, kind


def _tied(key: Key, values: dict[str, Any]) -> None:
    """Halves and whole numbers, many of them alike."""
    x = values["x"]
    if all(x.stride()):
        x.copy_((2 * x).round() / 2)


TOGETHER = Op(
    reference=extreme_together,
    flops=lambda key: 4.0 * costs.size(key.spec("x")),
    traffic=lambda key: (
        2 * costs.inputs(key) + costs.size(key.spec("x")) * DTYPES[_dtype(key)].itemsize
    ),
    normal=_alike,
    cases=_cases,
    stress=_tied,
    outputs=2,
    internal=True,
    stands_for=("max", "min", "extreme_backward"),
)


def _dtype(key: Key) -> str:
    x = key.spec("x")
    assert x is not None
    return x.dtype


TOGETHER.candidate(EAGER, trusted=True)(extreme_together)
TOGETHER.add(Candidate("chosen.apart", bind=_bind_apart, sources=(_bind_apart,), trusted=True))
MAX.joined = MIN.joined = of_forward
BACKWARD.twins = of_backward
