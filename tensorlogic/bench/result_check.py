"""Does a result file hold on this machine: a sample of its rows measured again, side by side with PyTorch as before."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..core import policy
from . import compare, machine_info, measure_case, session
from .cases import CATEGORIES, Case
from .machine_info import clocks
from .result_file import Results, Row, load
from .terminal.progress import Tick
from .terminal.user_error import Problem

SAMPLE = 12  # rows that are measured again
MARGIN = 0.15  # by which the speed over PyTorch may differ
# before a row counts as not holding: a disturbance does not last
ATTEMPTS = 3


@dataclass
class Verified:
    """Rows measured again, and how each compares."""

    held: list[compare.Change]
    failed: list[compare.Change]
    differences: list[str]
    rows: int

    def __str__(self) -> str:
        count = len({c.id for c in (*self.held, *self.failed)})
        bad = len({c.id for c in self.failed})
        verdict = (
            f"{count - bad} of {count} rows hold, measured again out of {self.rows} "
            f"(speed over PyTorch within {MARGIN:.0%}, 95 % intervals)"
        )
        notes = "".join(f"note: {d}\n" for d in self.differences)
        return f"{compare.table(self.failed, 'now', 'now / file')}{notes}{verdict}"


def sample(results: Results, count: int = SAMPLE) -> list[Row]:
    """Rows of every category, the same ones for the same file."""
    draw = random.Random(len(results.rows))
    groups = [[r for r in results.timed if r.category == c] for c in CATEGORIES]
    for group in groups:
        draw.shuffle(group)
    chosen: list[Row] = []
    while len(chosen) < count and any(groups):
        for group in groups:
            if group and len(chosen) < count:
                chosen.append(group.pop())
    return chosen


def verify(path: Path, tick: Tick = lambda done, total, text: None) -> Verified:
    """Measure a sample of a file's rows again.

    Raises:
        Problem: the file cannot be read, holds no timed row, or is of another device than this machine has.
    """
    known = load(path)
    if not known.timed:
        raise Problem(f"{path} holds no timed row")
    device = session.pick_device(known.kind)
    fresh = machine_info.describe(device)
    here = replace(known, machine=fresh, complete=True)
    other = compare.differing(known, here)
    if other:
        raise Problem(
            f"{path} is of another machine, where alone it can be verified ({'; '.join(other)})"
        )
    differences = compare.machines(known, here, False)
    found = Verified([], [], differences, len(known.timed))
    chosen = sample(known)
    with policy.measuring():
        for done, row in enumerate(chosen):
            tick(done, len(chosen), row.id)
            changes = _again(row, known, device)
            (found.failed if any(_off(c) for c in changes) else found.held).extend(changes)
    tick(len(chosen), len(chosen), "done")
    return found


def _again(row: Row, known: Results, device: torch.device) -> list[compare.Change]:
    """How a row compares with itself measured now; the best of some attempts."""
    case = Case(row.category, row.op, row.size, row.dtype, device.type, row.detail)
    effort = measure_case.QUICK if known.run.get("quick") else measure_case.FULL
    for _ in range(ATTEMPTS):
        now = measure_case.measured(case, device, effort)
        changes = compare.changes(row, now, clocks(known), MARGIN, False)
        if not any(_off(c) for c in changes):
            break
    return changes


def _off(change: compare.Change) -> bool:
    return change.verdict in ("worse", "better", "broken")
