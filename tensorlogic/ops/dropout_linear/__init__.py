"""dropout_linear: dropout as the prologue of a linear layer; the mask is a function of a seed, so none is stored."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import argument_checks, saved_tensors
from ...core.candidate import Outputs
from ...core.key import Key, TensorSpec
from ...core.op import Gradient, Op, bits
from ...dispatch import dispatcher
from ...kernels.register import rows
from ...system.capture_state import capturing
from ..common import linear_ops, sample_inputs, tensor_checks
from ..common.dropout_rng import draw, keep_mask, seeded
from ..common.linear_ops import Needs, Values
from ..linear import LINEAR, LINEAR_BACKWARD, linear


def dropped(x: Tensor, p: float, seed: int, offset: int, state: Tensor | None) -> Tensor:
    """dropout(x) by the mask of a seed."""
    s, o = (seed, offset) if state is None else (state[0], state[1])
    return torch.where(keep_mask(tuple(x.shape), p, s, o, x.device), x / (1 - p), 0)


def _dropout_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: float,
    seed: int,
    offset: int,
    state: Tensor | None,
    save: bool,
) -> tuple[Tensor, ...]:
    """dropout(x [..., K]) · weight [N, K]ᵀ + bias [N], the mask from (seed, offset) or from state [2]."""
    return (F.linear(dropped(x, p, seed, offset, state), weight, bias),)


def dropout_linear_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    mask: Tensor | None,
    p: float,
    seed: int,
    offset: int,
    state: Tensor | None,
    needs: str,
) -> tuple[Tensor | None, ...]:
    """dy [..., N] -> dx, dweight, dbias; the mask is regenerated unless forward kept one."""
    flat = rows(dy)
    scale = 1 / (1 - p)
    if mask is None:
        s, o = (seed, offset) if state is None else (state[0], state[1])
        mask = keep_mask(tuple(x.shape), p, s, o, x.device)
    return (
        (dy @ weight) * mask * scale if needs[0] == "1" else None,
        flat.t() @ rows(x * mask * scale) if needs[1] == "1" else None,
        flat.sum(0) if needs[2] == "1" else None,
    )


_dropout_linear.__name__ = "dropout_linear"


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Values, outs: Outputs) -> Values:
    x, weight, *_, state = dynamic
    mask = outs[1] if len(outs) > 1 else None
    return (
        saved_tensors.read(x, needs[1]),
        saved_tensors.read(weight, needs[0]),
        mask if mask is not None and mask.numel() == x.numel() else None,
        state,
    )


def _backward(
    flags: SimpleNamespace, needs: Needs, saved: Values, scalars: Values, dy: Tensor
) -> Values:
    x, weight, mask, state = saved_tensors.from_meta(saved, dy)
    if mask is None and dy.layout is torch.strided:
        # kernels that make the mask again want whole rows; PyTorch's operations take ten times as
        # long
        dy = dy.contiguous()
    grads = backward_call(dy, x, weight, mask, *scalars, state, bits(needs[:3]))
    return (*(g if n else None for g, n in zip(grads, needs[:3], strict=True)), None)


def _cases() -> Any:
    for m, k, n, p in ((2, 3, 5, 0.5), (33, 17, 65, 0.1), (64, 128, 96, 0.25), (0, 4, 3, 0.5)):
        yield *linear_ops.operands(m, k, n), p, 12345678901, 8, None
    state = torch.tensor([2**61 + 5, 2**40 + 3])
    yield torch.randn(2, 3, 8), torch.randn(4, 8), None, 0.3, 0, 0, state


def _state(
    key: Any, name: str, spec: Any, device: torch.device, g: torch.Generator
) -> Tensor | None:
    if name == "state":
        return torch.randint(0, 2**62, (2,), device=device, generator=g)
    return sample_inputs.scaled({"weight": 1})(key, name, spec, device, g)


def _captured(key: Key) -> Iterator[tuple[Op, Key]]:
    """A traced call takes its seed from a tensor, a captured one that is recorded is PyTorch's dropout and our linear:
    both should meet measured keys, too."""
    if key.spec("state") is None and key.device != "cpu":
        state = TensorSpec("i64", (2,), (1,))
        yield DROPOUT_LINEAR, replace(key, tensors=(*key.tensors[:-1], state))
    if key.spec("state") is None and key.device != "cpu" and key.direction == "forward":
        x, weight, bias, _ = key.tensors
        yield LINEAR, _as(LINEAR, key, (_fresh(x), weight, bias, None), key.flags[-1])


def _captured_backward(key: Key) -> Iterator[tuple[Op, Key]]:
    if key.spec("state") is None and key.device != "cpu":
        dy, x, weight, _, _ = key.tensors
        needs = f"{dict(key.flags)['needs']}0"
        tensors = (dy, _fresh(x), weight, None)
        yield LINEAR_BACKWARD, _as(LINEAR_BACKWARD, key, tensors, ("needs", needs))


def _fresh(spec: TensorSpec | None) -> TensorSpec | None:
    """The same as an output of PyTorch's, which is aligned."""
    return spec and replace(spec, align=16)


def _as(op: Op, key: Key, tensors: tuple[TensorSpec | None, ...], flag: tuple[str, Any]) -> Key:
    """The key of a plain linear layer, or of its backward."""
    names = tuple(p.name for p in op.tensors)
    flags = (("activation", "none"), flag)
    return replace(key, op=op.name, tensors=tensors, names=names, flags=flags)


_SCALARS = {"p": 0.25, "seed": 20260917, "offset": 12}
DROPOUT_LINEAR = linear_ops.op(
    _dropout_linear,
    sample=_state,
    scalars=lambda key: _SCALARS,
    stress=sample_inputs.cancelling("x", "weight"),
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
    runtime=("seed", "offset"),
    twins=_captured,
    baseline=_dropout_linear,
    draws=True,
    outputs=2,
)
DROPOUT_LINEAR_BACKWARD = linear_ops.backward_op(
    dropout_linear_backward,
    "dy",
    "x",
    sample=_state,
    scalars=lambda key: _SCALARS,
    runtime=("seed", "offset"),
    twins=_captured_backward,
    outputs=3,
)
backward_call = dispatcher.internal(DROPOUT_LINEAR_BACKWARD)
DROPOUT_LINEAR_BACKWARD.candidate("torch.eager", trusted=True)(dropout_linear_backward)


@DROPOUT_LINEAR.candidate("torch.eager", trusted=True)
def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: float,
    seed: int,
    offset: int,
    state: Tensor | None,
    save: bool,
) -> tuple[Tensor, ...]:
    """PyTorch's own dropout and linear; the mask is PyTorch's, and kept for backward as PyTorch does.

    On a GPU it is drawn by PyTorch's fused kernel, unless the caller gave a generator (the seed is negative then).
    """
    own = state is None and (seed < 0 or x.device.type == "cpu")
    if own and not torch._C._len_torch_dispatch_stack():
        noise = torch.empty_like(x).bernoulli_(1 - p, generator=seeded(x.device, seed, offset))
        y = F.linear(x * noise.div_(1 - p), weight, bias)
        return (y, noise != 0) if save else (y,)
    dropped, mask = torch.native_dropout(x, p, True)
    y = F.linear(dropped, weight, bias)
    return (y, mask) if save else (y,)


@dispatcher.public(DROPOUT_LINEAR)
def _masked(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: float,
    seed: int,
    offset: int,
    state: Tensor | None,
) -> tuple[Any, ...]:
    linear_ops.checked("dropout_linear", x, weight, bias)
    return x, weight, bias, p, seed, offset, state


def dropout_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    p: float = 0.5,
    training: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """dropout(x, p) · weightᵀ + bias in one call; each element is kept with probability 1 - p and scaled by 1 / (1 - p).

    The mask follows from a seed drawn from the generator: reproducible after torch.manual_seed, the same in backward, drawn
    anew at every replay of a captured graph. It need not equal the mask of torch.nn.functional.dropout.

    Args:
        x: [..., K], floating. weight: [N, K], same dtype. bias: [N] or None. p: in [0, 1). training: False is a plain linear.
        generator: of x's device; PyTorch's default one if None.

    Returns:
        [..., N] in x's dtype.

    Raises:
        TypeError: not a tensor, not floating, or dtypes differ. ValueError: shapes, devices or p do not fit.

    Source: Srivastava et al., Dropout, JMLR 15 (2014); masks by Philox, Salmon et al., SC 2011.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.dropout_linear(torch.ones(2, 3), torch.ones(4, 3), None, p=0.5, training=False).shape
        torch.Size([2, 4])
    """
    if not (p.__class__ is float and 0.0 <= p < 1.0):
        p = tensor_checks.number(
            "dropout_linear", "p", p, 0.0, 1.0, "in [0, 1), the share of elements to drop,"
        )
    if not isinstance(x, Tensor):
        tensor_checks.tensors("dropout_linear", {"x": x, "weight": weight}, {"bias": bias})
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"dropout_linear: generator is {argument_checks.describe(generator)}; a torch.Generator of x's device or None is required"
        )
    if not argument_checks.flag("dropout_linear", "training", training) or p == 0.0:
        try:
            return linear(x, weight, bias)
        except (TypeError, ValueError):
            # of the same, by this function's name
            linear_ops.checked("dropout_linear", x, weight, bias)
            raise
    if generator is None and capturing(x.device):
        # A captured seed costs a launch of its own, 2.3 us on an H200, which the fused mask won back at no size. Behind
        # PyTorch's kernel a product of ours does not begin early, and gains in its backward only.
        recorded = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, weight, bias)
        )
        return (linear if recorded else F.linear)(F.dropout(x, p), weight, bias)
    # vmap may want a mask for each example, which have no one seed
    if dispatcher.transforming():
        linear_ops.checked("dropout_linear", x, weight, bias)
        kept = torch.rand(x.shape, device=x.device, generator=generator) >= p
        return linear(torch.where(kept, x / (1 - p), 0), weight, bias)
    seed, offset, state = draw(x.device, generator)
    return _masked(x, weight, bias, p, seed, offset, state)
