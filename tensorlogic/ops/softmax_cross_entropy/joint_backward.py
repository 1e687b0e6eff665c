"""Loss and gradient as one op: whether a recorded call prepares its gradient in forward is chosen by the time of both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...core.key import Key, TensorSpec
from ...core.op import Op
from ..common import costs, joint, sample_inputs
from . import SOFTMAX_CROSS_ENTROPY as FORWARD
from . import SOFTMAX_CROSS_ENTROPY_BACKWARD as BACKWARD
from . import some_ignored


def softmax_cross_entropy_together(
    dloss: Tensor, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Tensor, ...]:  # fmt: skip
    """The loss, and its gradient with respect to logits for the incoming gradient dloss."""
    flags = (ignore_index, label_smoothing, reduction)
    loss, *kept = FORWARD.reference(logits, target, *flags, True)
    return loss, *BACKWARD.reference(dloss, logits, target, *kept, *flags)


def _eager(
    dloss: Tensor, logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, reduction: str
) -> tuple[Tensor, ...]:  # fmt: skip
    """PyTorch's own loss and the gradient that its autograd makes."""
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        flags = (ignore_index, label_smoothing, reduction)
        (loss,) = FORWARD.reference(leaf, target, *flags, False)
    return loss.detach(), *torch.autograd.grad(loss, leaf, dloss)


def _prepare(key: Key, values: dict[str, Any]) -> None:
    """What comes in is the same from step to step: it is timed so."""
    values["dloss"].fill_(1.0)


def _stress(key: Key, values: dict[str, Any]) -> None:
    """Wide logits, rows that are ignored, and another gradient than before."""
    sample_inputs.multiply(values["logits"], 40)
    some_ignored(key, values)
    values["dloss"].fill_(3.0)


def both(key: Key) -> tuple[joint.Part, joint.Part]:
    """Forward and backward with their keys."""
    dloss, target, logits = key.spec("dloss"), key.spec("target"), key.present("logits")
    wide = "f64" if logits.dtype == "f64" else "f32"
    given = {"logits": logits, "target": target}
    kept = {
        "lse": TensorSpec(wide, (costs.size(target),), (1,)),
        "share": TensorSpec(wide, (1,), (1,)),
    }
    return (
        joint.part(FORWARD, given, (*key.flags, ("save", True)), key.device),
        joint.part(BACKWARD, {"dloss": dloss, **given, **kept}, key.flags, key.device),
    )


def _whole(key: Key) -> joint.Part | None:
    """The joined key of a reduced loss."""
    if key.flag("reduction") == "none":
        return None
    logits = key.present("logits")
    flags = tuple(f for f in key.flags if f[0] != "save")
    dloss = TensorSpec(logits.dtype, (), ())
    tensors = {"dloss": dloss, "logits": logits, "target": key.spec("target")}
    return joint.part(TOGETHER, tensors, flags, key.device)


def _reads(dloss: Tensor, given: Any, outs: Any) -> tuple[Any, ...]:
    return dloss, *given, outs[1], outs[2]


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
joint.candidates(TOGETHER, _eager, both, _reads, differentiates=True)
of_forward, of_backward = joint.of_forward(_whole), joint.of_backward(_whole)
FORWARD.joined = of_forward
BACKWARD.twins = of_backward
