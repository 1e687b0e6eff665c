"""matmul: a · b with an optional activation, batched, broadcast and strided as torch.matmul."""

from __future__ import annotations

from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core import argument_checks, saved_tensors
from ...core.activations import ACTIVATIONS, SMOOTH, Activation, activate, activate_, remembered
from ...core.activations import gradient as activation_gradient
from ...core.candidate import Outputs
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...core.numeric_mode import Mode
from ...core.op import Gradient, Op, bits
from ...core.precision_policy import precision as Precision
from ...dispatch import dispatcher
from ...kernels.cpu import onednn
from ..common import canonical_keys, costs, linear_ops, sample_inputs, tensor_checks
from ..common.linear_ops import Needs, Values


def matmul_reference(a: Tensor, b: Tensor, activation: str, save: bool) -> tuple[Tensor, ...]:
    """a [..., M, K] @ b [..., K, N] -> y [..., M, N], and the pre-activation where backward needs it."""
    z = torch.matmul(a, b)
    y = activate(z, activation)
    return (y, z) if save and activation in SMOOTH else (y,)


def matmul_backward_reference(
    dy: Tensor, a: Tensor, b: Tensor, kept: Tensor | None, activation: str, needs: str
) -> tuple[Tensor | None, ...]:
    """dy [..., M, N] -> da, db summed over broadcast batch dimensions; kept is y (relu) or z (gelu, silu)."""
    dz = activation_gradient(dy, kept, activation)
    if a.dim() == 1 and b.dim() == 1:
        return (dz * b if needs[0] == "1" else None, dz * a if needs[1] == "1" else None)
    # by far the most calls, each view of which is a launch's worth of host time
    if a.dim() == dz.dim() == b.dim() == 2:
        return (
            torch.mm(dz, _adjoint(b)) if needs[0] == "1" else None,
            torch.mm(_adjoint(a), dz) if needs[1] == "1" else None,
        )
    left, right = a.unsqueeze(0) if a.dim() == 1 else a, b.unsqueeze(1) if b.dim() == 1 else b
    dz = dz.unsqueeze(-2) if a.dim() == 1 else dz.unsqueeze(-1) if b.dim() == 1 else dz
    da = _summed(dz @ right.mH, left.shape).view(a.shape) if needs[0] == "1" else None
    db = _summed(left.mH @ dz, right.shape).view(b.shape) if needs[1] == "1" else None
    return (da, db)


def _adjoint(matrix: Tensor) -> Tensor:
    return matrix.mH if matrix.is_complex() else matrix.t()


def _summed(gradient: Tensor, shape: torch.Size) -> Tensor:
    return gradient if gradient.shape == shape else gradient.sum_to_size(shape)


matmul_reference.__name__, matmul_backward_reference.__name__ = "matmul", "matmul_backward"


def mnk(key: Key) -> tuple[int, int, int]:
    """M, N and K of the product, its batch among M."""
    a, b = key.spec("a"), key.spec("b")
    assert a is not None and b is not None
    n = b.shape[-1] if len(b.shape) > 1 else 1
    batch = max(prod(a.shape[:-2]), prod(b.shape[:-2]))
    return batch * (a.shape[-2] if len(a.shape) > 1 else 1), n, a.shape[-1]


def _traffic(key: Key) -> float:
    a = key.spec("a")
    assert a is not None
    m, n, _ = mnk(key)
    return costs.inputs(key) + m * n * DTYPES[a.dtype].itemsize


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Values, outs: Outputs) -> Values:
    a, b = dynamic
    return (
        saved_tensors.read(a, needs[1]),
        saved_tensors.read(b, needs[0]),
        remembered(flags.activation, outs),
    )


def _backward(
    flags: SimpleNamespace, needs: Needs, saved: Values, scalars: Values, dy: Tensor
) -> Values:
    grads = backward_call(dy, *saved_tensors.from_meta(saved, dy), flags.activation, bits(needs))
    return tuple([g if n else None for g, n in zip(grads, needs, strict=True)])


def _cases() -> Any:
    for a, b in (
        ((2, 3), (3, 5)),
        ((33, 17), (17, 65)),
        ((4, 9, 16), (4, 16, 7)),
        ((3, 1, 5, 8), (2, 8, 6)),
        ((8,), (8, 3)),
        ((4, 8), (8,)),
        ((8,), (8,)),
        ((0, 4), (4, 3)),
        ((3, 0), (0, 4)),
    ):
        yield torch.randn(a), torch.randn(b), "none"
    for activation in ACTIVATIONS[1:]:
        yield torch.randn(16, 9).t(), torch.randn(8, 16).t(), activation


MATMUL = Op(
    normal=canonical_keys.flat_left("a"),
    reference=matmul_reference,
    flops=lambda key: 2.0 * prod(mnk(key)),
    traffic=_traffic,
    sample=sample_inputs.scaled({"b": -2}),
    stress=sample_inputs.cancelling("a", "b", -1, -2),
    direct=lambda key: torch.matmul if key.flag("activation") == "none" else None,
    landmarks=sample_inputs.picked("a", "b", transposed=False),
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
    autocast="lower",
    outputs=2,
)
MATMUL_BACKWARD = linear_ops.backward_op(
    matmul_backward_reference,
    normal=canonical_keys.flat_left("dy", "a", "kept"),
    flops=lambda key: 4.0 * prod(mnk(key)),
    sample=sample_inputs.scaled({"b": -2}),
    outputs=2,
)
backward_call = dispatcher.internal(MATMUL_BACKWARD)


@dispatcher.public(MATMUL)
def matmul(
    a: Tensor,
    b: Tensor,
    activation: Activation | None = None,
    *,
    precision: Precision | Mode | None = None,
) -> tuple[Any, ...]:
    """activation(a · b), as torch.matmul: note that b is [K, N] here and linear's weight is [N, K].

    Args:
        a: [..., M, K] or [K], floating. b: [..., K, N] or [K], same dtype; batch dimensions broadcast.
        activation: None, "relu", "gelu" (erf), "gelu_tanh" or "silu".
        precision: `tensorlogic.precision(...)` for this call; under it, floating dtypes may differ.

    Returns:
        [..., M, N], without the dimension of a one-dimensional argument, in a's dtype.

    Raises:
        TypeError: not a tensor, not floating, or dtypes differ. ValueError: shapes, devices or activation do not fit.

    Source: torch.matmul.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.matmul(torch.eye(2), torch.tensor([[1.0, -2.0], [3.0, 4.0]]), activation="relu")
        tensor([[1., 0.],
                [3., 4.]])
    """
    tensor_checks.tensors("matmul", {"a": a, "b": b})
    argument_checks.one_of("matmul", "activation", activation, (None, *ACTIVATIONS))
    tensor_checks.floating("matmul", {"a": a, "b": b}, autocast=True)
    if a.dim() < 1 or b.dim() < 1:
        raise ValueError(
            f"matmul: a is {argument_checks.describe(a)} and b is {argument_checks.describe(b)}; both need at least one dimension: use a * b for numbers"
        )
    inner = b.shape[-2] if b.dim() > 1 else b.shape[0]
    if a.shape[-1] != inner:
        raise ValueError(
            f"matmul: a is {argument_checks.describe(a)} and b is {argument_checks.describe(b)}; a's last dimension ({a.shape[-1]}) must equal b's second to last ({inner}): transpose one with .mT"
        )
    try:
        argument_checks.broadcast(a.shape[:-2], b.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"matmul: a is {argument_checks.describe(a)} and b is {argument_checks.describe(b)}; their batch dimensions do not broadcast"
        ) from None
    return a, b, activation or "none"


MATMUL.candidate("torch.eager", trusted=True)(matmul_reference)


@MATMUL.candidate(
    "torch.linear",
    supports=lambda key: (
        None
        if key.device == "cpu" and len(key.tensors[1].shape) == 2
        else "for CPUs and a two-dimensional b"
    ),
    trusted=True,
)
def by_linear(a: Tensor, b: Tensor, activation: str, save: bool) -> tuple[Tensor, ...]:
    """The same product through torch.nn.functional.linear, which takes another road in PyTorch's CPU code."""
    z = torch.nn.functional.linear(a, b.t())
    y = activate(z, activation)
    return (y, z) if save and activation in SMOOTH else (y,)


def _onednn(key: Key) -> str | None:
    a, b = key.spec("a"), key.spec("b")
    if (
        a is None
        or b is None
        or a.dtype != "f32"
        or len(b.shape) != 2
        or len(a.shape) < 2
        or 0 in (*a.shape, *b.shape)
    ):
        return "float32, non-empty, two-dimensional b only"
    if key.flag("save") and key.flag("activation") in SMOOTH:
        return "the pre-activation must be kept"
    return onednn.onednn_weight(b)


@MATMUL.candidate(
    "onednn.linear", supports=_onednn, available=onednn.onednn_available, trusted=True
)
def onednn_linear(a: Tensor, b: Tensor, activation: str, save: bool) -> tuple[Tensor, ...]:
    """oneDNN's product with its own activation."""
    return (onednn.onednn(a, b.t(), None, activation),)


@MATMUL.candidate("torch.widened", supports=lambda key: onednn.widened(key, "a"), trusted=True)
def widened(a: Tensor, b: Tensor, activation: str, save: bool) -> tuple[Tensor, ...]:
    """A half product in float32, b widened once and kept if it is a parameter; rounded at the end."""
    z = torch.matmul(a.float(), onednn.wide_weight(b))
    kept = z.to(a.dtype) if save and activation in SMOOTH else None
    y = activate_(z, activation).to(a.dtype)
    return (y,) if kept is None else (y, kept)


MATMUL_BACKWARD.candidate("torch.eager", trusted=True)(matmul_backward_reference)
linear_ops.add_widened(MATMUL_BACKWARD)
