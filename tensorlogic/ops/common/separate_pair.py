"""Forward and backward of an op as each of them is chosen, beside which candidates that make both are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ...autotune import measure_key
from ...core import policy
from ...core.candidate import Launcher
from ...core.key import Key
from ...core.op import Op
from ...dispatch import decision
from ...dispatch import selector as dispatch_selector
from ...system import capture_state

Way = Callable[[decision.Choice, decision.Choice], Launcher]


def launcher(both: Sequence[tuple[Op, Key]], device: torch.device, way: Way) -> Launcher:
    """What `way` makes of the two choices, for eager and for captured calls; measured first where the policy measures."""
    args = (torch.empty(0, device=device),)
    if policy.current().tune == "full" and capture_state.measurable(device):
        for op, k in both:
            measure_key.measured(op, k, device)
    with policy.measuring() as chosen:
        ahead, back = (dispatch_selector.choose(op, k, args, chosen) for op, k in both)
    eager = way(ahead, back)
    if not (ahead.captured or back.captured):
        return eager
    captured = way(ahead.captured or ahead, back.captured or back)
    capturing = torch.cuda.is_current_stream_capturing
    return lambda *args: captured(*args) if capturing() else eager(*args)
