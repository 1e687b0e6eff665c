"""attention_scores: softmax(scale · q kᵀ + mask), every score written once."""

from __future__ import annotations

import sys
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core import argument_checks, saved_tensors
from ...core.candidate import Outputs
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...core.op import Args, Gradient, Kept, Needs, Op, bits
from ...dispatch import dispatcher
from ..common import canonical_keys, costs, tensor_checks

# files for a device, in the order in which ties are broken
CANDIDATES = {"cuda": ("triton", "triton_hopper")}

WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def _masked_scores(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool
) -> Tensor:
    return masked(q @ k.transpose(-1, -2), scale, mask, is_causal)


def masked(scores: Tensor, scale: float, mask: Tensor | None, is_causal: bool) -> Tensor:
    """scale · scores + mask."""
    if scale != 1.0:
        scores = scores * scale
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if is_causal:  # last: what is hidden is, whatever a mask adds there
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    return scores


def _attention_scores(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool, save: bool
) -> tuple[Tensor, ...]:
    """softmax over T of scale · q [..., S, D] · k [..., T, D]ᵀ + mask -> [..., S, T]."""
    return (torch.softmax(_masked_scores(q, k, scale, mask, is_causal), -1),)


_attention_scores.__name__ = "attention_scores"


def unseen_zeroed(ds: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """ds with 0, in place, where a score is hidden: as in PyTorch no gradient comes of what is filled in, be the row NaN."""
    if is_causal:
        ds.tril_()
    if mask is not None and mask.dtype == torch.bool:
        words = WORDS[ds.itemsize]  # on a CPU masked_fill_ and where take 4 to 20 times as long
        ds.view(words).bitwise_and_(mask.to(words).neg_())
    return ds


def attention_scores_backward(
    dy: Tensor, q: Tensor, k: Tensor, y: Tensor, scale: float, mask: Tensor | None, is_causal: bool, needs: str
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dy [..., S, T] -> dq, dk and the gradient of an additive mask, each summed to its operand's shape."""
    ds = torch.ops.aten._softmax_backward_data(dy, y, -1, y.dtype)
    ds = unseen_zeroed(ds, mask, is_causal)
    return (
        (ds @ k * scale).sum_to_size(q.shape) if needs[0] == "1" else None,
        (ds.transpose(-1, -2) @ q * scale).sum_to_size(k.shape) if needs[1] == "1" else None,
        ds.sum_to_size(mask.shape) if needs[2] == "1" and mask is not None else None,
    )


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Args, outs: Outputs) -> Kept:
    q, k, _, mask = dynamic
    hides = mask is not None and mask.dtype == torch.bool
    seen = saved_tensors.read(mask, hides) if hides or needs[2] else None
    return (saved_tensors.read(q, needs[1]), saved_tensors.read(k, needs[0]), outs[0], seen)


def _backward(flags: SimpleNamespace, needs: Needs, saved: Args, scalars: Args, dy: Tensor) -> Args:
    q, k, y, mask = saved_tensors.from_meta(saved, dy)
    grads = backward_call(dy, q, k, y, scalars[0], mask, flags.is_causal, bits(needs))
    return tuple([g if n else None for g, n in zip(grads, needs, strict=True)])


def _cases() -> Any:
    for b, h, s, t, d in ((1, 2, 5, 7, 16), (2, 1, 33, 65, 24), (1, 1, 64, 64, 64)):
        q, k = torch.randn(b, h, s, d), torch.randn(b, h, t, d)
        yield q, k, d**-0.5, None, False
        yield q, k, d**-0.5, None, True
        yield q, k, d**-0.5, torch.randn(b, 1, s, t), False
        keep = torch.rand(s, t) > 0.3
        keep[:, 0] = True
        yield q, k, 0.3, keep, False
    yield torch.randn(6, 8), torch.randn(9, 8), 1.0, None, False
    yield torch.randn(2, 3, 8).transpose(0, 1), torch.randn(3, 4, 8), 0.5, None, False


def _shape(key: Key) -> tuple[int, int, int, int]:
    q, k = key.present("q"), key.present("k")
    return max(prod(q.shape[:-2]), prod(k.shape[:-2])), q.shape[-2], k.shape[-2], q.shape[-1]


def _traffic(key: Key) -> float:
    batch, s, t, _ = _shape(key)
    return costs.inputs(key) + batch * s * t * DTYPES[key.present("q").dtype].itemsize


def _made(key: Key, values: dict[str, Any]) -> None:
    """y as forward makes it: each row a softmax of what it sees, 0 where a score is hidden and in rows that see nothing."""
    y = values["y"]
    scores = masked(y, 1.0, values["mask"], key.flag("is_causal"))
    y.copy_(torch.softmax(scores, -1).nan_to_num_(0.0))


ATTENTION_SCORES = Op(
    normal=canonical_keys.heads("q", "k"),
    reference=_attention_scores,
    flops=lambda key: 2.0 * prod(_shape(key)),
    traffic=_traffic,
    scalars=lambda key: {"scale": max(1, _shape(key)[3]) ** -0.5},
    cases=_cases,
    gradient=Gradient(_kept, _backward, again=True),
    autocast="composition",
)
ATTENTION_SCORES_BACKWARD = Op(
    normal=canonical_keys.heads("dy", "q", "k", "y"),
    reference=attention_scores_backward,
    flops=lambda key: 4.0 * prod(_shape(key)),
    traffic=lambda key: 2 * costs.inputs(key),
    scalars=lambda key: {"scale": _shape(key)[3] ** -0.5},
    outputs=3,
    internal=True,
    prepare=_made,
)
backward_call = dispatcher.internal(ATTENTION_SCORES_BACKWARD)
ATTENTION_SCORES.candidate("torch.eager", trusted=True)(_attention_scores)
ATTENTION_SCORES_BACKWARD.candidate("torch.eager", trusted=True)(attention_scores_backward)


@ATTENTION_SCORES.candidate("torch.inplace", trusted=True)
def in_place(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool, save: bool
) -> tuple[Tensor, ...]:
    """Scale and masks in the scores' own memory."""
    scores = (q @ k.transpose(-1, -2)).mul_(scale)
    if mask is not None and mask.dtype == torch.bool:
        scores.masked_fill_(~mask, float("-inf"))
    elif mask is not None:
        scores.add_(mask)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores.masked_fill_(hidden, float("-inf"))
    return (torch.softmax(scores, -1),)


@ATTENTION_SCORES.candidate("torch.scaled_query", trusted=True)
def scaled_query(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None, is_causal: bool, save: bool
) -> tuple[Tensor, ...]:
    """The scale on the query, which is smaller than the scores."""
    return (torch.softmax(_masked_scores(q * scale, k, 1.0, mask, is_causal), -1),)


@dispatcher.public(ATTENTION_SCORES)
def attention_scores(
    q: Tensor, k: Tensor, scale: float, mask: Tensor | None = None, is_causal: bool = False
) -> tuple[Any, ...]:
    """softmax(scale · q kᵀ + mask) over the last dimension, for those who need the scores themselves.

    Args:
        q: [..., S, D]. k: [..., T, D], same floating dtype; leading dimensions broadcast. scale: finite number, often D ** -0.5.
        mask: broadcastable to [..., S, T]; bool (True takes part) or a floating tensor that is added; None.
        is_causal: row i sees columns 0..i. A row that sees nothing becomes NaN, as in torch.softmax.

    Returns:
        [..., S, T] in q's dtype; each row sums to 1.

    Raises:
        TypeError: not tensors, not floating, or dtypes differ. ValueError: shapes, devices or scale do not fit.

    Source: Vaswani et al., Attention Is All You Need, arXiv:1706.03762.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.attention_scores(torch.zeros(1, 2), torch.zeros(4, 2), 1.0)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    fn = "attention_scores"
    tensor_checks.tensors(fn, {"q": q, "k": k}, {"mask": mask})
    tensor_checks.floating(fn, {"q": q, "k": k}, autocast=True)
    if q.dim() < 2 or k.dim() < 2 or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"{fn}: q is {argument_checks.describe(q)} and k is {argument_checks.describe(k)}; [..., S, D] and [..., T, D] with one D are required"
        )
    try:
        batch = argument_checks.broadcast(q.shape[:-2], k.shape[:-2])
    except RuntimeError:
        raise ValueError(
            f"{fn}: q is {argument_checks.describe(q)} and k is {argument_checks.describe(k)}; their leading dimensions do not broadcast"
        ) from None
    number = tensor_checks.number(
        fn, "scale", scale, -sys.float_info.max, float("inf"), "that is finite"
    )
    if mask is not None:
        tensor_checks.broadcasts(fn, "mask", mask, (*batch, q.shape[-2], k.shape[-2]))
        if mask.dtype != torch.bool:
            tensor_checks.floating(fn, {"mask": mask})
            if mask.is_complex() and not q.is_complex():
                raise TypeError(
                    f"{fn}: mask is {argument_checks.describe(mask)}; a boolean or real floating mask is required"
                )
            mask = mask.to(q.dtype)
    return q, k, number, mask, argument_checks.flag(fn, "is_causal", is_causal)
