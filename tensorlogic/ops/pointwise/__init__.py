"""Element-wise ops, plain and fused: add, sub, mul, div, relu, gelu, silu, add_relu, mul_relu, affine, with gradients."""

from __future__ import annotations

from numbers import Number
from typing import Any, Literal

import torch
from torch import Tensor

from ...core import argument_checks
from ...dispatch import dispatcher
from ..common import documented, tensor_checks
from .definitions import ADD, ADD_RELU, AFFINE, DIV, GELU, MUL, MUL_RELU, RELU, SILU, SUB

# files for a device, in the order in which ties are broken
CANDIDATES = {"cuda": ("triton", "triton_broadcast_grad", "triton_relu_mask")}


def _broadcast(fn: str, given: dict[str, Any]) -> tuple[Tensor, ...]:
    """Tensors that broadcast together; numbers become zero-dimensional tensors, as PyTorch promotes them."""
    first = next((v for v in given.values() if isinstance(v, Tensor)), None)
    if first is None:
        tensor_checks.tensors(fn, given)
    values = {n: _number(v, given) if isinstance(v, Number) else v for n, v in given.items()}
    placed = {n: v for n, v in values.items() if not _on_any_device(v)}
    tensor_checks.tensors(fn, placed)
    wide = [v.shape for v in values.values() if v.dim()]
    if all(shape == wide[0] for shape in wide):  # symbolic sizes have no hash
        return tuple(values.values())
    try:
        argument_checks.broadcast(*(v.shape for v in values.values()))
    except RuntimeError:
        shapes = ", ".join(f"{n} is {argument_checks.describe(v)}" for n, v in values.items())
        raise ValueError(f"{fn}: {shapes}; shapes that broadcast together are required") from None
    return tuple(values.values())


def _on_any_device(v: Any) -> bool:
    return isinstance(v, Tensor) and v.dim() == 0 and v.device.type == "cpu"


def _number(value: Any, given: dict[str, Any]) -> Tensor:
    """A number as a tensor that promotes as the number would: among tensors of no dimensions it would outrank them."""
    present = [v for v in given.values() if isinstance(v, Tensor)]
    if all(t.dim() == 0 for t in present):
        if torch.compiler.is_dynamo_compiling():  # which has no result_type
            return torch.tensor(value, dtype=(present[0] * value).dtype, device="cpu")
        return torch.tensor(value, dtype=torch.result_type(present[0], value), device="cpu")
    return torch.tensor(value, device="cpu")  # PyTorch takes a number there from any device


def _real(fn: str, **given: Tensor) -> None:
    for name, t in given.items():
        if not t.is_floating_point():
            raise TypeError(
                f"{fn}: {name} is {argument_checks.describe(t)}; a real floating dtype is required: convert it with {name}.float()"
            )


_TWO = {
    "args": "a, b: tensors of any dtype on one device (or numbers), whose shapes broadcast.",
    "returns": "The broadcast shape, in PyTorch's promoted dtype.",
    "raises": "TypeError: neither is a tensor. ValueError: shapes do not broadcast, or devices differ.",
}
_REAL = _TWO | {
    "args": "a, b: tensors on one device (or numbers), real dtypes, whose shapes broadcast."
}
_THREE = _TWO | {
    "args": "x, scale, bias: tensors on one device (or numbers), whose shapes broadcast.",
    "raises": _TWO["raises"].replace("neither", "none"),
}


@documented.public(ADD, **_TWO)
def add(a: Tensor | complex, b: Tensor | complex) -> tuple[Any, ...]:
    """a + b, broadcast and promoted as torch.add.

    Source: torch.add.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.add(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
        tensor([4., 6.])
    """
    return _broadcast("add", {"a": a, "b": b})


@documented.public(SUB, **_TWO)
def sub(a: Tensor | complex, b: Tensor | complex) -> tuple[Any, ...]:
    """a - b, broadcast and promoted as torch.sub.

    Source: torch.sub.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.sub(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]))
        tensor([-2., -3.])
    """
    return _broadcast("sub", {"a": a, "b": b})


@documented.public(MUL, **_TWO)
def mul(a: Tensor | complex, b: Tensor | complex) -> tuple[Any, ...]:
    """a * b, broadcast and promoted as torch.mul.

    Source: torch.mul.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.mul(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0]))
        tensor([ 3., 10.])
    """
    return _broadcast("mul", {"a": a, "b": b})


@documented.public(DIV, **_TWO)
def div(a: Tensor | complex, b: Tensor | complex) -> tuple[Any, ...]:
    """a / b, broadcast and promoted as torch.div.

    Source: torch.div.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.div(torch.tensor([1.0, 6.0]), torch.tensor([2.0, 3.0]))
        tensor([0.5000, 2.0000])
    """
    return _broadcast("div", {"a": a, "b": b})


@dispatcher.public(RELU)
def relu(x: Tensor) -> tuple[Any, ...]:
    """max(x, 0); NaN stays NaN.

    Args:
        x: any shape, any real dtype.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: not a tensor.

    Source: torch.relu.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.relu(torch.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """
    tensor_checks.tensors("relu", {"x": x})
    return (x,)


@dispatcher.public(GELU)
def gelu(x: Tensor, approximate: Literal["none", "tanh"] = "none") -> tuple[Any, ...]:
    """x * Phi(x), the Gaussian error linear unit.

    Args:
        x: any shape, real floating dtype. approximate: "none" (erf) or "tanh".

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: not a tensor, or not floating. ValueError: unknown approximation.

    Source: Hendrycks and Gimpel, arXiv:1606.08415; torch.nn.functional.gelu.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.gelu(torch.tensor([-1.0, 2.0]))
        tensor([-0.1587,  1.9545])
    """
    tensor_checks.tensors("gelu", {"x": x})
    argument_checks.one_of("gelu", "approximate", approximate, ("none", "tanh"))
    _real("gelu", x=x)
    return x, approximate


@dispatcher.public(SILU)
def silu(x: Tensor) -> tuple[Any, ...]:
    """x * sigmoid(x), the sigmoid linear unit.

    Args:
        x: any shape, floating dtype.

    Returns:
        x's shape and dtype.

    Raises:
        TypeError: not a tensor, or not floating.

    Source: Elfwing et al., arXiv:1702.03118; torch.nn.functional.silu.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.silu(torch.tensor([0.0, 2.0]))
        tensor([0.0000, 1.7616])
    """
    tensor_checks.tensors("silu", {"x": x})
    _real("silu", x=x)
    return (x,)


@documented.public(ADD_RELU, **_REAL)
def add_relu(a: Tensor | complex, b: Tensor | complex) -> tuple[Any, ...]:
    """relu(a + b) in one pass over memory.

    Source: torch.relu(torch.add(a, b)).

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.add_relu(torch.tensor([-3.0, 2.0]), torch.tensor([1.0, 1.0]))
        tensor([0., 3.])
    """
    return _broadcast("add_relu", {"a": a, "b": b})


@documented.public(MUL_RELU, **_REAL)
def mul_relu(a: Tensor | complex, b: Tensor | complex) -> tuple[Any, ...]:
    """relu(a * b) in one pass over memory.

    Source: torch.relu(torch.mul(a, b)).

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.mul_relu(torch.tensor([-3.0, 2.0]), torch.tensor([1.0, 2.0]))
        tensor([0., 4.])
    """
    return _broadcast("mul_relu", {"a": a, "b": b})


@documented.public(AFFINE, **_THREE)
def affine(x: Tensor | complex, scale: Tensor | complex, bias: Tensor | complex) -> tuple[Any, ...]:
    """x * scale + bias in one pass over memory.

    Source: x * scale + bias in PyTorch.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.affine(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 2.0]), torch.tensor([0.5, 0.5]))
        tensor([2.5000, 4.5000])
    """
    return _broadcast("affine", {"x": x, "scale": scale, "bias": bias})
