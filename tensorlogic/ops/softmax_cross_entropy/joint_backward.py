"""Loss and gradient as one op: whether a recorded call prepares its gradient in forward is chosen by the time of both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...core.candidate import EAGER, Candidate, Config, Launcher
from ...core.key import Key, TensorSpec
from ...core.op import Op, key_flags
from ...dispatch import decision
from ...system import hardware
from ..common import costs, sample_inputs, separate_pair
from . import SOFTMAX_CROSS_ENTROPY as FORWARD
from . import SOFTMAX_CROSS_ENTROPY_BACKWARD as BACKWARD
from . import some_ignored


def softmax_cross_entropy_together(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> tuple[Tensor, ...]:
    """The loss, and its gradient with respect to logits for the incoming gradient dloss."""
    flags = (ignore_index, label_smoothing, reduction)
    loss, *kept = FORWARD.reference(logits, target, *flags, True)
    return loss, *BACKWARD.reference(dloss, logits, target, *kept, *flags)


def _eager(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> tuple[Tensor, ...]:
    """PyTorch's own loss and the gradient that its autograd makes."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        rows, labels = leaf.reshape(-1, leaf.shape[-1]), target.reshape(-1)
        loss = F.cross_entropy(
            rows,
            labels,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            reduction=reduction,
        )
        loss = loss.view(target.shape) if reduction == "none" else loss
    return loss.detach(), *torch.autograd.grad(loss, leaf, dloss)


def _prepare(key: Key, values: dict[str, Any]) -> None:
    """What comes in is the same from step to step: it is timed so."""
    values["dloss"].fill_(1.0)


def _stress(key: Key, values: dict[str, Any]) -> None:
    """Wide logits, rows that are ignored, and another gradient than before."""
    sample_inputs.multiply(values["logits"], 40)
    some_ignored(key, values)
    values["dloss"].fill_(3.0)


def _parts(key: Key) -> tuple[Key, Key]:
    """The keys of forward and backward, chosen apart."""
    dloss, logits, target = key.tensors
    assert dloss is not None and logits is not None and target is not None
    rows = costs.size(target)
    wide = "f64" if logits.dtype == "f64" else "f32"
    forward = Key(
        op=FORWARD.name,
        tensors=(logits, target),
        names=("logits", "target"),
        flags=(*key.flags, ("save", True)),
        device=key.device,
        direction="forward",
    )
    backward = Key(
        op=BACKWARD.name,
        tensors=(
            dloss,
            logits,
            target,
            TensorSpec(wide, (rows,), (1,)),
            TensorSpec(wide, (1,), (1,)),
        ),
        names=("dloss", "logits", "target", "lse", "share"),
        flags=key.flags,
        device=key.device,
        direction="backward",
    )
    return forward, backward


def _whole(logits: TensorSpec | None, target: TensorSpec | None, key: Key) -> tuple[Op, Key]:
    assert logits is not None
    flags = tuple(f for f in key.flags if f[0] != "save")
    return TOGETHER, Key(
        op=TOGETHER.name,
        tensors=(TensorSpec(logits.dtype, (), ()), logits, target),
        names=("dloss", "logits", "target"),
        flags=flags,
        device=key.device,
        direction="backward",
    )


def of_forward(key: Key) -> tuple[Op, Key] | None:
    """A recorded key with its backward pass, on a device that has a candidate which makes both in one pass."""
    able = key.device == "cuda" or hardware.interpreting()
    if not able or key.flag("reduction") == "none" or not key.flag("save"):
        return None
    return _whole(key.spec("logits"), key.spec("target"), key)


def of_backward(key: Key) -> Iterable[tuple[Op, Key]]:
    """As `of_forward`, from the backward key: measured after it, so that what it is compared with is known."""
    if key.device == "cuda" and key.flag("reduction") != "none":
        yield _whole(key.spec("logits"), key.spec("target"), key)


def _bind_apart(key: Key, config: Config, device: torch.device) -> Launcher:
    """Forward and backward as each of them is chosen."""
    plain = TOGETHER.closer(_eager, *key_flags(key))

    def way(ahead: decision.Choice, back: decision.Choice) -> Launcher:
        if ahead.candidate.id == EAGER:  # recorded, it brings PyTorch's own backward
            return plain

        def launch(dloss: Tensor, logits: Tensor, target: Tensor) -> Any:
            outs = ahead.launch(logits, target)
            if outs is None:
                return None
            grads = back.launch(dloss, logits, target, outs[1], outs[2])
            return None if grads is None else (outs[0], grads[0])

        return launch

    both = zip((FORWARD, BACKWARD), _parts(key), strict=True)
    return separate_pair.launcher(tuple(both), device, way)


def _cases() -> Any:
    for case in FORWARD.cases():
        logits, target, *flags = case
        if flags[2] != "none":
            yield torch.ones(()), logits, target, *flags


TOGETHER = Op(
    reference=softmax_cross_entropy_together,
    flops=lambda key: 9.0 * costs.size(key.spec("logits")),
    traffic=lambda key: 2 * costs.inputs(key),
    sample=lambda key, name, spec, device, g: (
        None if name == "dloss" else FORWARD.sample(key, name, spec, device, g)
    ),
    prepare=_prepare,
    stress=_stress,
    cases=_cases,
    keyed=("label_smoothing",),
    outputs=2,
    internal=True,
    stands_for=(FORWARD.name, BACKWARD.name),
)
TOGETHER.candidate(EAGER, trusted=True)(_eager)
TOGETHER.add(Candidate("chosen.apart", bind=_bind_apart, sources=(_bind_apart,), trusted=True))
FORWARD.joined = of_forward
BACKWARD.twins = of_backward
