"""softmax_cross_entropy: the loss of a classifier from its logits, in one pass over them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core import argument_checks
from ...core.candidate import Outputs
from ...core.key import Key, TensorSpec
from ...core.op import Args, Gradient, Kept, Needs, Op
from ...dispatch import dispatcher
from ..common import costs, sample_inputs, tensor_checks

# files for a device, in the order in which ties are broken
CANDIDATES = {"cuda": ("triton", "triton_joint")}

REDUCTIONS = ("mean", "sum", "none")


def _softmax_cross_entropy(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str, save: bool
) -> tuple[Tensor, ...]:  # fmt: skip
    """-log softmax(logits [..., C])[target [...]], smoothed and reduced; with save also what backward needs, in float32:
    the rows' log-sum-exp [rows] (0 where ignored), and [1] the weight of a row in the reduction."""
    rows, labels = logits, target
    if logits.dim() != 2:
        rows, labels = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = F.cross_entropy(
        rows, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )  # fmt: skip
    loss = loss.view(target.shape) if reduction == "none" and logits.dim() != 2 else loss
    if not save:
        return (loss,)
    counts = labels != ignore_index
    valid = counts.sum().to(_wide(rows))
    share = (1 / valid if reduction == "mean" else torch.ones_like(valid)).view(1)
    return loss, torch.where(counts, torch.logsumexp(rows.to(_wide(rows)), 1), 0), share


def softmax_cross_entropy_backward(
    dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, share: Tensor,
    ignore_index: int, label_smoothing: float, reduction: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    """dlogits = (softmax(logits) - smoothed one-hot) · dloss per row, 0 where ignored."""
    wide = _wide(logits)
    rows, labels = logits.reshape(-1, logits.shape[-1]).to(wide), target.reshape(-1)
    valid = labels != ignore_index
    grad = torch.softmax(rows, 1) - label_smoothing / rows.shape[1]
    hot = torch.where(valid, labels, 0).unsqueeze(1)
    grad.scatter_add_(1, hot, torch.full_like(hot, 0, dtype=wide) - (1 - label_smoothing))
    scale = dloss.reshape(-1).to(wide) * share.to(wide)
    grad = torch.where(valid.unsqueeze(1), grad * scale.unsqueeze(1), 0)
    return (grad.to(logits.dtype).view(logits.shape),)


_softmax_cross_entropy.__name__ = "softmax_cross_entropy"


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)


def _kept(flags: SimpleNamespace, needs: Needs, dynamic: Args, outs: Outputs) -> Kept:
    return (*dynamic, *outs[1:])


def _backward(flags: SimpleNamespace, needs: Needs, saved: Args, scalars: Args, dy: Tensor) -> Args:
    if len(saved) > 4:  # the gradient was prepared by forward: see triton_joint.py
        if dispatcher.ordinary(dy):
            return (flags.settle(dy, *saved), None)
        logits, target, lse, share = saved[:4]
        saved = (logits, target, lse[: target.numel()], share)
    grads = backward_call(dy, *saved, flags.ignore_index, flags.label_smoothing, flags.reduction)
    return (grads[0], None)


def _cases() -> Any:
    for shape, c in (((7,), 5), ((33,), 65), ((16,), 3000), ((2, 3), 11), ((), 6)):
        for reduction in REDUCTIONS:
            yield torch.randn(*shape, c), torch.randint(c, shape), -100, 0.0, reduction
    target = torch.randint(9, (12,))
    target[::3] = 2
    yield torch.randn(12, 9), target, 2, 0.1, "mean"
    yield 50 * torch.randn(12, 9), target, -100, 0.3, "sum"
    yield torch.randn(12, 9), torch.full((12,), 2), 2, 0.0, "none"


def _sample(
    key: Key, name: str, spec: TensorSpec, device: torch.device, g: torch.Generator
) -> Tensor | None:
    logits = key.present("logits")
    if name == "target" and 0 not in spec.shape and all(spec.stride):
        target = torch.randint(0, logits.shape[-1], spec.shape, device=g.device, generator=g)
        return target.to(device).as_strided(spec.shape, spec.stride)
    return None


def some_ignored(key: Key, values: dict[str, Any]) -> None:
    """Every seventh row counts for nothing. Not where calls are timed: a kernel that skips such rows would seem faster than it is."""
    target = values["target"]
    if target.numel() > 1 and all(target.stride()):  # one row that counts for nothing has no mean
        rows = torch.arange(target.numel(), device=target.device).reshape(target.shape)
        target.masked_fill_(rows % 7 == 3, key.flag("ignore_index"))


def _row_statistics(key: Key, values: dict[str, Any]) -> None:
    """Wide logits, careless exponentials overflow, and rows that are ignored."""
    sample_inputs.multiply(values["logits"], 40)
    some_ignored(key, values)


def _consistent(key: Key, values: dict[str, Any]) -> None:
    """The log-sum-exp that forward would have kept."""
    logits = values["logits"]
    values["lse"] = torch.logsumexp(logits.reshape(-1, logits.shape[-1]).to(_wide(logits)), 1)
    valid = (values["target"] != key.flag("ignore_index")).sum()
    values["share"].fill_(1.0 / valid.item() if key.flag("reduction") == "mean" else 1.0)


def _ignored_and_consistent(key: Key, values: dict[str, Any]) -> None:
    """Rows that are ignored, and what forward would have kept of them."""
    some_ignored(key, values)
    _consistent(key, values)


SOFTMAX_CROSS_ENTROPY = Op(
    reference=_softmax_cross_entropy,
    flops=lambda key: 5.0 * costs.size(key.tensors[0]),
    traffic=costs.inputs,
    sample=_sample,
    stress=_row_statistics,
    cases=_cases,
    gradient=Gradient(_kept, _backward, once=4),
    keyed=("label_smoothing",),
    autocast="float32",
    outputs=3,
)
SOFTMAX_CROSS_ENTROPY_BACKWARD = Op(
    reference=softmax_cross_entropy_backward,
    flops=lambda key: 4.0 * costs.size(key.spec("logits")),
    traffic=lambda key: 2 * costs.inputs(key),
    sample=_sample,
    prepare=_consistent,
    stress=_ignored_and_consistent,
    keyed=("label_smoothing",),
    internal=True,
)
backward_call = dispatcher.internal(SOFTMAX_CROSS_ENTROPY_BACKWARD)
SOFTMAX_CROSS_ENTROPY.candidate("torch.eager", trusted=True)(_softmax_cross_entropy)
SOFTMAX_CROSS_ENTROPY_BACKWARD.candidate("torch.eager", trusted=True)(
    softmax_cross_entropy_backward
)


@dispatcher.public(SOFTMAX_CROSS_ENTROPY)
def _rows(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Any, ...]:
    fn = "softmax_cross_entropy"
    tensor_checks.tensors(fn, {"logits": logits, "target": target})
    tensor_checks.floating(fn, {"logits": logits})
    if logits.dim() < 1 or logits.shape[-1] < 1 or tuple(target.shape) != tuple(logits.shape[:-1]):
        raise ValueError(
            f"{fn}: logits is {argument_checks.describe(logits)} (classes last) and target is {argument_checks.describe(target)}; "
            f"logits [N, C] or [C] with target [N] or [], or logits [N, C, d1, ...] with target [N, d1, ...], is required"
        )
    if target.dtype != torch.int64:
        raise TypeError(
            f"{fn}: target is {argument_checks.describe(target)}; class indices of dtype int64 are required: convert with target.long()"
        )
    argument_checks.one_of(fn, "reduction", reduction, REDUCTIONS)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise TypeError(
            f"{fn}: ignore_index is {argument_checks.describe(ignore_index)}; an int is required"
        )
    smoothing = tensor_checks.number(
        fn, "label_smoothing", label_smoothing, 0.0, 1.0 + 1e-12, "in [0, 1]"
    )
    return logits, target, ignore_index, smoothing, reduction


def softmax_cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> Tensor:
    """Cross-entropy between softmax(logits) and class indices, as torch.nn.functional.cross_entropy.

    Args:
        logits: [N, C], [C] or [N, C, d1, ...], floating. target: [N], [] or [N, d1, ...], int64 in [0, C) or ignore_index.
        ignore_index: rows with this target count for nothing. label_smoothing: in [0, 1].
        reduction: "mean" over the rows that count, "sum" or "none".

    Returns:
        The loss in logits' dtype: a scalar, or target's shape for "none". On a GPU a target out of range makes that row's loss
        NaN or a device-side assertion, without a synchronisation; on a CPU it raises IndexError.

    Raises:
        TypeError: not tensors, logits not floating, target not int64. ValueError: shapes, devices or options do not fit.

    Source: torch.nn.functional.cross_entropy; label smoothing by Szegedy et al., arXiv:1512.00567.

    Example:
        >>> import torch, tensorlogic
        >>> tensorlogic.softmax_cross_entropy(torch.zeros(1, 4), torch.tensor([2]))
        tensor(1.3863)
    """
    if isinstance(logits, Tensor) and logits.dim() > 2:
        logits = logits.movedim(1, -1)
    return _rows(logits, target, ignore_index, label_smoothing, reduction)
