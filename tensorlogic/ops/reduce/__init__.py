"""Reductions: sum, mean, max, min over any dimensions, accumulated in float32, values only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core import argument_checks, saved_tensors
from ...core.candidate import Outputs
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...core.op import Args, Gradient, Kept, Needs, Op
from ...dispatch import dispatcher
from ..common import canonical_keys, costs, documented, tensor_checks

# files for a device, in the order in which ties are broken
CANDIDATES = {"cuda": ("triton", "triton_extreme")}

Dims = tuple[int, ...]


def _sum(x: Tensor, dim: Dims, keepdim: bool, save: bool) -> tuple[Tensor, ...]:
    """Sum over dim."""
    if dim:
        return (torch.sum(x, dim, keepdim),)
    whole = not (x.is_floating_point() or x.is_complex())
    return (x.to(torch.int64, copy=True) if whole else x.clone(),)


def _mean(x: Tensor, dim: Dims, keepdim: bool, save: bool) -> tuple[Tensor, ...]:
    """Mean over dim."""
    return (torch.mean(x, dim, keepdim) if dim else x.clone(),)


def _max(x: Tensor, dim: Dims, keepdim: bool, save: bool) -> tuple[Tensor, ...]:
    """Largest value over dim; NaN wins."""
    return (torch.amax(x, dim, keepdim) if dim else x.clone(),)


def _min(x: Tensor, dim: Dims, keepdim: bool, save: bool) -> tuple[Tensor, ...]:
    """Smallest value over dim; NaN wins."""
    return (torch.amin(x, dim, keepdim) if dim else x.clone(),)


for _meaning in (_sum, _mean, _max, _min):
    _meaning.__name__ = _meaning.__name__.removeprefix("_")  # the op's name is its reference's


def _restored(dy: Tensor, dim: Dims, keepdim: bool, dims: int) -> Tensor:
    """dy with size 1 where it was reduced."""
    if not keepdim and len(dim) < dims:
        for d in dim:
            dy = dy.unsqueeze(d)
    return dy  # of a whole tensor: a scalar, which meets any shape


def extreme_backward(
    dy: Tensor, x: Tensor, y: Tensor, dim: Dims, keepdim: bool
) -> tuple[Tensor, ...]:
    """dx = dy / ties where x is y, the extreme over dim, else 0: ties share equally, as of PyTorch's amax."""
    hit, share = x == _restored(y, dim, keepdim, x.dim()), _restored(dy, dim, keepdim, x.dim())
    return (hit * (share / hit.sum(dim, keepdim=True) if dim else share),)


def _uncancelled(key: Key, values: dict[str, Any]) -> None:
    """Sums of the sample inputs are at least as large as their norms: what rounds a sum that cancels by luck is luck, too."""
    x, dim = values["x"], key.flag("dim")
    shared = any(n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True))
    if not dim or not x.numel() or not (x.is_floating_point() or x.is_complex()) or shared:
        return
    wide = torch.promote_types(x.dtype, torch.float32)
    total = x.sum(dim, keepdim=True, dtype=wide)
    norm = torch.linalg.vector_norm(x, 2, dim, keepdim=True)
    count = prod(x.shape[d] for d in dim)
    x.add_(torch.where(total.abs() < norm, (norm - total) / count, 0).to(x.dtype))


def _consistent(key: Key, values: dict[str, Any]) -> None:
    """The extreme that forward would have kept; of a largest or of a smallest one the work is the same."""
    x, y, dim = values["x"], values["y"], key.flag("dim")
    if x.numel() and all(y.stride()):
        y.copy_(torch.amax(x, dim, key.flag("keepdim")) if dim else x)


def rounded_to_halves(key: Key, values: dict[str, Any]) -> None:
    """Halves and whole numbers, many of them alike."""
    x = values["x"]
    if all(x.stride()):
        x.copy_((2 * x).round() / 2)


def _tied(key: Key, values: dict[str, Any]) -> None:
    """Values of which many are alike, and their extremes."""
    rounded_to_halves(key, values)
    _consistent(key, values)


EXTREME_BACKWARD = Op(
    normal=canonical_keys.reduced,
    reference=extreme_backward,
    flops=lambda key: 3.0 * costs.size(key.spec("x")),
    traffic=costs.pointwise_traffic,
    prepare=_consistent,
    stress=_tied,
    internal=True,
)
EXTREME_BACKWARD.candidate("torch.eager", trusted=True)(extreme_backward)
backward_call = dispatcher.internal(EXTREME_BACKWARD)


def _op(
    meaning: Callable[..., tuple[Tensor, ...]], own: Callable[..., Tensor], extreme: bool
) -> Op:
    def direct(key: Key) -> Callable[..., Tensor] | None:
        dim, keepdim = key.flag("dim"), key.flag("keepdim")
        if not dim:
            return None
        first = dim[0] if len(dim) == 1 else dim  # which PyTorch reads faster
        if keepdim:
            return lambda x: own(x, first, True)
        return lambda x: own(x, first)

    def save(flags: SimpleNamespace, needs: Needs, dynamic: Args, outs: Outputs) -> Kept:
        # where forward has kept the places of the extremes, these: see joint_backward.py
        return (dynamic[0], *outs) if extreme else (saved_tensors.SavedMeta(dynamic[0]),)

    def backward(
        flags: SimpleNamespace, needs: Needs, saved: Args, scalars: Args, dy: Tensor
    ) -> Args:
        if extreme and len(saved) > 2 and dispatcher.ordinary(dy):
            return (flags.settle(dy.contiguous(), *saved),)
        if extreme:
            return backward_call(dy.contiguous(), *saved[:2], flags.dim, flags.keepdim)
        shape = saved[0].shape
        count = prod(shape[d] for d in flags.dim) if op.name == "mean" else 1
        dy = _restored(dy / count if count != 1 else dy, flags.dim, flags.keepdim, len(shape))
        return (dy.expand(shape),)

    op = Op(
        normal=canonical_keys.reduced,
        reference=meaning,
        flops=lambda key: float(costs.size(key.tensors[0])),
        traffic=_traffic,
        cases=lambda: _cases(extreme),
        gradient=Gradient(save, backward, again=extreme, light=extreme),
        autocast="composition",
        direct=direct,
        prepare=None if extreme else _uncancelled,
    )
    op.candidate("torch.eager", trusted=True)(meaning)
    return op


def _traffic(key: Key) -> float:
    x = key.present("x")
    left = prod(n for d, n in enumerate(x.shape) if d not in key.flag("dim"))
    return costs.inputs(key) + left * DTYPES[x.dtype].itemsize


def _cases(extreme: bool) -> Any:
    for shape, dim in (
        ((7,), (0,)),
        ((33, 65), (0, 1)),
        ((33, 65), (1,)),
        ((33, 65), (0,)),
        ((2, 3, 5), (0, 2)),
        ((4, 5), ()),
        ((3000,), (0,)),
    ):
        yield torch.randn(shape), dim, False
    yield torch.randn(3, 4, 5), (1,), True
    yield torch.randn(8, 9).t(), (0,), False
    if not extreme:
        yield torch.randn(0, 4), (0,), False


SUM, MEAN = _op(_sum, torch.sum, False), _op(_mean, torch.mean, False)
MAX, MIN = _op(_max, torch.amax, True), _op(_min, torch.amin, True)
FAMILY = (SUM, MEAN, MAX, MIN)


def _checked(fn: str, x: Tensor, dim: int | Sequence[int] | None, keepdim: bool) -> tuple[Any, ...]:
    tensor_checks.tensors(fn, {"x": x})
    given = tuple(dim) if isinstance(dim, (tuple, list, range)) else () if dim is None else (dim,)
    given = given or tuple(range(x.dim()))  # as PyTorch's
    dims = []
    for d in map(argument_checks.index, given):
        if d is None:
            raise TypeError(f"{fn}: dim is {dim!r}; an int, a tuple of ints or None is required")
        if not -(x.dim() or 1) <= d < (x.dim() or 1):
            raise ValueError(
                f"{fn}: dim is {dim!r}, but x is {argument_checks.describe(x)}; dimensions from {-x.dim()} to {x.dim() - 1} are required"
            )
        dims.append(d % (x.dim() or 1))
    if len(set(dims)) != len(dims):
        raise ValueError(f"{fn}: dim is {dim!r}, which names a dimension twice; name each once")
    # Not sorted(dims), nor `in`: a number that torch.compile made a symbol must become a constant.
    order = tuple(d for d in range(x.dim()) if any(d == wanted for wanted in dims))
    if fn in ("max", "min") and any(x.shape[d] == 0 for d in order):
        raise ValueError(
            f"{fn}: x is {argument_checks.describe(x)}; at least one element along dim {dim!r} is required"
        )
    if fn == "mean" and not (x.is_floating_point() or x.is_complex()):
        raise TypeError(
            f"mean: x is {argument_checks.describe(x)}; a floating dtype is required: convert it with x.float()"
        )
    return x, order, argument_checks.flag(fn, "keepdim", keepdim)


def _parts(x: str, dims: str, made: str, wrong: str, empty: str) -> dict[str, str]:
    return {
        "args": f"x: {x}. dim: dimension, {dims}, or None or () for all. keepdim: keep them with size 1.",
        "returns": f"x's shape without dim (or with size 1 there), x's dtype{made}.",
        "raises": f"TypeError: not a tensor, {wrong}dim is no int, or keepdim no bool. ValueError: dim out of range{empty}.",
    }


_DIMS, _TWICE = "tuple of dimensions", " or named twice"
_SUM = _parts("any shape and dtype", _DIMS, " (int64 for integers, as torch.sum)", "", _TWICE)
_MEAN = _parts(
    "any shape, floating dtype", _DIMS, "; NaN where there is nothing to average", "not floating, ", _TWICE
)  # fmt: skip
_EXTREME = _parts(
    "any shape with elements along dim, real dtype", "tuple", "", "", ", named twice, or empty"
)


@documented.public(SUM, **_SUM)
def sum(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> tuple[Any, ...]:
    """Sum over dimensions, accumulated in float32 or wider.

    Source: torch.sum.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.sum(torch.ones(2, 3), dim=1)
        tensor([3., 3.])
    """
    return _checked("sum", x, dim, keepdim)


@documented.public(MEAN, **_MEAN)
def mean(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> tuple[Any, ...]:
    """Mean over dimensions, accumulated in float32 or wider.

    Source: torch.mean.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.mean(torch.tensor([1.0, 2.0, 6.0]))
        tensor(3.)
    """
    return _checked("mean", x, dim, keepdim)


@documented.public(MAX, **_EXTREME)
def max(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> tuple[Any, ...]:
    """Largest value over dimensions (no indices); NaN wins, as in torch.amax.

    Source: torch.amax.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.max(torch.tensor([[1.0, 5.0], [3.0, 2.0]]), dim=0)
        tensor([3., 5.])
    """
    return _checked("max", x, dim, keepdim)


@documented.public(MIN, **_EXTREME)
def min(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False
) -> tuple[Any, ...]:
    """Smallest value over dimensions (no indices); NaN wins, as in torch.amin.

    Source: torch.amin.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.min(torch.tensor([[1.0, 5.0], [3.0, 2.0]]))
        tensor(1.)
    """
    return _checked("min", x, dim, keepdim)
