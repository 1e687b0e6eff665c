"""Forward and backward of an op as one op: how its keys are found, and its two candidates without a kernel of their own.

A recorded call may be served by a candidate that makes both where that takes less time than the two chosen apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...autotune import measure_key
from ...core import policy
from ...core.candidate import EAGER, Candidate, Config, Launcher, Outputs
from ...core.key import Key, TensorSpec
from ...core.op import Op, key_flags
from ...dispatch import decision
from ...dispatch import selector as dispatch_selector
from ...system import capture_state, hardware

Part = tuple[Op, Key]
Whole = Callable[[Key], Part | None]
# from (incoming gradient, what forward was given, what it made) to what backward takes
Reads = Callable[[Any, Sequence[Any], Outputs], Sequence[Any]]


def part(
    op: Op, tensors: Mapping[str, TensorSpec | None], flags: Sequence[tuple[str, Any]], device: str
) -> Part:
    """An op and its key of these tensors and flags."""
    return op, Key(
        op=op.name,
        tensors=tuple(tensors.values()),
        names=tuple(tensors),
        flags=tuple(flags),
        device=device,
        direction="backward" if op.gradient is None else "forward",
    )


def of_forward(whole: Whole) -> Whole:
    """`whole` of recorded keys, on a device that has a candidate which makes both."""

    def found(key: Key) -> Part | None:
        able = key.device == "cuda" or hardware.interpreting()
        return whole(key) if able and key.flag("save") else None

    return found


def of_backward(whole: Whole) -> Callable[[Key], Sequence[Part]]:
    """`whole` of backward keys on a GPU: measured after them, so that what it is compared with is known."""

    def found(key: Key) -> Sequence[Part]:
        joined = whole(key) if key.device == "cuda" else None
        return () if joined is None else (joined,)

    return found


def candidates(
    op: Op,
    eager: Callable[..., Outputs],
    both: Callable[[Key], tuple[Part, Part]],
    reads: Reads,
    differentiates: bool = False,
) -> None:
    """Register `torch.eager` of a joined op, and `chosen.apart`: forward and backward as each of them is chosen.

    `both`: the two with their keys. `reads`: what backward takes. `differentiates`: where forward is eager's, so is backward,
    by PyTorch's autograd.
    """

    def bind(key: Key, config: Config, device: torch.device) -> Launcher:
        parts = both(key)
        count = len(parts[0][1].tensors)

        def pair(ahead: decision.Choice, back: decision.Choice) -> Launcher:
            if differentiates and ahead.candidate.id == EAGER:
                return op.closer(eager, *key_flags(key))
            forward, backward = ahead.launch, back.launch

            def launch(dy: Any, *given: Any) -> Any:
                outs = forward(*given[:count])
                if outs is None:
                    return None
                grads = backward(*reads(dy, given, outs))
                return None if grads is None else (outs[0], grads[0])

            return launch

        return _chosen(parts, device, pair)

    op.candidate(EAGER, trusted=True)(eager)
    op.add(Candidate("chosen.apart", bind=bind, sources=(both, reads), trusted=True))


def _chosen(
    parts: tuple[Part, Part],
    device: torch.device,
    pair: Callable[[decision.Choice, decision.Choice], Launcher],
) -> Launcher:
    """What `pair` makes of the two choices, for eager and for captured calls; measured first where the policy measures."""
    args = (torch.empty(0, device=device),)
    if policy.current().tune == "full" and capture_state.can_tune_now(device):
        for op, k in parts:
            measure_key.measured(op, k, device)
    with policy.measuring() as chosen:
        ahead, back = (dispatch_selector.choose(op, k, args, chosen) for op, k in parts)
    eager = pair(ahead, back)
    if not (ahead.captured or back.captured):
        return eager
    captured = pair(ahead.captured or ahead, back.captured or back)
    capturing = torch.cuda.is_current_stream_capturing
    return lambda *args: captured(*args) if capturing() else eager(*args)
