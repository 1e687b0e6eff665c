"""Gradients of the element-wise ops, as a table over the kind."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ...core import activations as core_activations


def _by(dz: Tensor, factor: Tensor | None) -> Tensor | None:
    return None if factor is None else dz * factor


# kind -> gradients of (a, b, c) from dz, the gradient before the activation; None of an operand that was not kept
BACKWARD: dict[str, Callable[..., tuple[Tensor | None, ...]]] = {
    "add": lambda dz, a, b: (dz, dz, None),
    "sub": lambda dz, a, b: (dz, -dz, None),
    "mul": lambda dz, a, b: (_by(dz, b), _by(dz, a), None),
    "div": lambda dz, a, b: (dz / b, None if a is None else -dz * ((a / b) / b), None),
    "affine": lambda dz, a, b: (_by(dz, b), _by(dz, a), dz),
}
SMOOTH = core_activations.SMOOTH  # keep the input for backward
# keep the output; then the gradient of the inner operation
RELU = {"relu": "relu", "add_relu": "add", "mul_relu": "mul"}


def backward(
    dy: Tensor, a: Tensor | None, b: Tensor | None, y: Tensor | None, kind: str
) -> tuple[Tensor | None, ...]:
    """Gradients of (a, b, c), not yet summed over broadcast dimensions; None where what it reads was not kept."""
    if kind in SMOOTH:
        return (core_activations.gradient(dy, a, kind), None, None)
    dz = core_activations.gradient(dy, y, "relu") if kind in RELU else dy
    inner = RELU.get(kind, kind)
    return (dz, None, None) if inner == "relu" else BACKWARD[inner](dz, a, b)
