"""What a model could still gain: one call of a copy of it watched, read as `tensorlogic try` reads a program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..trace.model_copies import fresh, sharing

if TYPE_CHECKING:
    from .report import Report


def watched(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Where the time of a call goes, op by op, with what a launch and fresh memory cost here; a copy of the model is called."""
    from .op_profile import Profile, summed

    twin = sharing(model, buffers=False)
    given = fresh(args, kwargs)
    with Profile() as profile:
        twin(*given[0], **given[1])
    return summed(profile)


def advise(report: Report) -> None:
    """Fill the report's `opportunities` and what it says of them, from what was watched and what came of it."""
    from . import remedies

    look = report.watched
    if look is None:
        return
    seen_us = 1e6 * sum(s["seconds"] for s in look["spent"])
    whole_us = seen_us if report.before_us is None else report.before_us
    every = remedies.opportunities(look, whole_us / 1e6)
    left, done = remedies.split(every, True, report.outcome == "captured")  # rewriting was tried
    obtained = None
    if report.ratio is not None and report.outcome != "original":
        obtained = (1 / report.ratio[0], 1 / report.ratio[2], 1 / report.ratio[1])
    report.opportunities = left
    report.advice = remedies.lines(left, done, obtained)
