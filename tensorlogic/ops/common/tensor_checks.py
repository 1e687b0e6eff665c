"""Checks of tensors and what goes with them: every error names the argument, what came, what is required, and the remedy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core import policy
from ...core.argument_checks import broadcast, describe, flag, index, one_of

__all__ = ["broadcast", "describe", "flag", "index", "one_of"]  # and what is defined here


def tensors(fn: str, required: dict[str, Any], optional: dict[str, Any] | None = None) -> None:
    """Every required argument is a tensor, every optional one a tensor or None, and all are on one device."""
    for name, value in required.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{fn}: {name} is {describe(value)}; a torch.Tensor is required (wrap data with torch.as_tensor)"
            )
    for name, value in (optional or {}).items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(
                f"{fn}: {name} is {describe(value)}; a torch.Tensor or None is required"
            )
    given = {**required, **{n: v for n, v in (optional or {}).items() if v is not None}}
    for name, value in given.items():
        if value.is_nested:
            raise TypeError(
                f"{fn}: {name} is a nested tensor; a tensor with one shape is required: pad it with torch.nested.to_padded_tensor"
            )
    if not given:
        return
    first, *rest = given.items()
    for name, value in rest:
        if value.device != first[1].device:
            raise ValueError(
                f"{fn}: {name} is {describe(value)}, but {first[0]} is on {first[1].device}; "
                f"all tensors must be on one device: move it with {name}.to({str(first[1].device)!r})"
            )


def autocasting(device: torch.device) -> bool:
    """True where autocast is on for tensors of this device."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def precise() -> bool:
    """True under a precision policy, which takes operands of any floating dtype."""
    return policy.current().precision is not None


def floating(fn: str, given: dict[str, Tensor | None], autocast: bool = False) -> None:
    """All given tensors share one floating (or complex) dtype; under autocast or a precision policy, any of them."""
    present = [(n, t) for n, t in given.items() if t is not None]
    first_name, first = present[0]
    lenient = autocast and autocasting(first.device)
    for name, t in present:
        if not (t.is_floating_point() or t.is_complex()):
            raise TypeError(
                f"{fn}: {name} is {describe(t)}; a floating dtype is required: convert it with {name}.to(torch.float16) or .float()"
            )
        if t.dtype != first.dtype and not lenient and not (autocast and precise()):
            raise TypeError(
                f"{fn}: {name} is {describe(t)}, but {first_name} is {describe(first)}; the dtypes must be equal: convert one with .to(dtype)"
            )


def shape(fn: str, name: str, t: Tensor | None, wanted: tuple[int, ...], why: str) -> None:
    """The tensor, if given, has exactly this shape."""
    if t is not None and tuple(t.shape) != wanted:
        raise ValueError(f"{fn}: {name} is {describe(t)}; shape {list(wanted)} is required, {why}")


def number(fn: str, name: str, value: Any, low: float, high: float, span: str) -> float:
    """A real number inside [low, high); NaN never is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{fn}: {name} is {describe(value)}; a number {span} is required")
    if not low <= value < high:
        raise ValueError(f"{fn}: {name} is {value!r}; a number {span} is required")
    return float(value)


def linear_shapes(fn: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """Check x [..., K], weight [N, K], bias [N]; returns the output's shape [..., N]."""
    if weight.dim() != 2:
        raise ValueError(
            f"{fn}: weight is {describe(weight)}; two dimensions [out_features, in_features] are required, as in torch.nn.functional.linear"
        )
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{fn}: x is {describe(x)}; its last dimension must be {weight.shape[1]}, weight's in_features (weight is {describe(weight)}); "
            f"if your weight is [in_features, out_features], pass weight.t()"
        )
    shape(
        fn,
        "bias",
        bias,
        (weight.shape[0],),
        f"one value for each of weight's {weight.shape[0]} output features",
    )
    return (*x.shape[:-1], weight.shape[0])


def broadcasts(fn: str, name: str, t: Tensor, wanted: tuple[int, ...]) -> Tensor:
    """The tensor expanded to `wanted`, the same object if it has that shape already."""
    if tuple(t.shape) == wanted:
        return t
    try:
        return t.expand(wanted)
    except RuntimeError:
        raise ValueError(
            f"{fn}: {name} is {describe(t)}; a shape that broadcasts to {list(wanted)} is required"
        ) from None
