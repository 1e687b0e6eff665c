"""A guard on tensors: type, dtype, device, sizes, strides and gradient as they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter


def guard(tensors: list[Tensor]) -> Callable[..., bool]:
    """A check(*tensors) that holds exactly when the tensors are what they are now.

    PyTorch's own compiled guard compares type, dispatch keys (device, autograd, autocast, functorch, inference mode),
    dtype, device index, requires_grad, sizes and strides of all tensors in 0.25 µs. It refuses one tensor passed twice,
    so that case is checked here.
    """
    places = {id(t): i for i, t in reversed(list(enumerate(tensors)))}
    first = [places[id(t)] for t in tensors]
    unique = sorted(set(first))
    kept = [tensors[i] for i in unique]
    sizes: list[Any] = [list(t.shape) for t in kept]
    strides: list[Any] = [list(t.stride()) for t in kept]
    check = torch._C._dynamo.guards.TensorGuards(
        *kept, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    if len(unique) == len(tensors):
        return cast(Callable[..., bool], check)
    return lambda *ts: (
        all(t is ts[i] for t, i in zip(ts, first, strict=True)) and check(*[ts[i] for i in unique])
    )


def plain(value: Any) -> bool:
    """Exactly a Tensor or a Parameter: no subclass whose meaning we could miss."""
    return type(value) is Tensor or type(value) is Parameter
