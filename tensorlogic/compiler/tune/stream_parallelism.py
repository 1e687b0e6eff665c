"""Independent branches of a captured program on streams of their own, kept where the graph is the same and faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...cuda_graphs.captured_graph import FAILURES, cause, heal
from ...measure import timer
from ..reporting.report import Report, Row
from ..runtime.parallel_branches import Section, sections
from ..runtime.program import Program

OP = "streams"
GAIN = 0.98  # of the time on one stream that branches may take
CHECKS = 3  # replays of both that must give the same bits
# timed as one: a single one is shorter than what waiting for it varies by
REPLAYS = 8
SHARE_S = 0.1  # for timing one choice of sections


def spread(program: Program, report: Report) -> None:
    """Record the branches of a captured program side by side: all that it has or, where that does not pay, the kind that
    should save most. A row of the report says what came of it."""
    if program.replay is None or program.training or not program.pure:
        return
    found = sections(program.function.nodes)
    if not found:
        return
    saved: dict[str, int] = {}
    for section in found:
        saved[section.kind] = saved.get(section.kind, 0) + section.gain
    most = max(saved, key=lambda kind: saved[kind])
    tries = [found]
    if len(saved) > 1:
        tries.append([s for s in found if s.kind == most])
    rows: list[Row] = []
    for chosen in tries:
        rows.append(row := Row("branches", OP, ""))
        if _kept(program, chosen, row):
            break
    report.rows = [*report.rows, next((r for r in rows if not r.refused), rows[0])]


def again(program: Program, lanes: Sequence[Any]) -> None:
    """Sections that an earlier process has kept, if this program still has all of them."""
    wanted = {tuple(tuple(lane) for lane in section) for section in lanes}
    found = [s for s in sections(program.function.nodes) if s.lanes in wanted]
    if len(found) == len(wanted):
        program.sections = found


def _kept(program: Program, chosen: Sequence[Section], row: Row) -> bool:
    """Whether these sections stand from now on."""
    row.count = len(chosen)
    row.candidate = f"{max(len(s.lanes) for s in chosen)} streams"
    flat, one = program.trace.example, program.replay
    program.sections = list(chosen)
    try:
        many = program.recorded(flat)
        row.refused = (
            "" if _same(one, many, flat) else "the outputs differ from those of one stream"
        )
    except FAILURES as problem:
        heal(program.device)
        row.refused = cause(problem)
    if not row.refused:
        calls: dict[str, Callable[[], Any]] = {"one": _replays(one), "many": _replays(many)}
        samples = timer.wall_samples(calls, program.device, SHARE_S)
        row.ratio = samples.ratio("many", "one")
        row.before_us, row.after_us = (samples.median(n) / REPLAYS for n in ("one", "many"))
        if row.ratio[0] <= GAIN and row.ratio[2] < 1:
            program.replay, program.way = many, None  # which led to the other one
            return True
        row.refused = "does not pay"
    program.sections = []
    return False


def _replays(replay: Any) -> Callable[[], Any]:
    again = replay.tape.replay

    def several() -> None:
        for _ in range(REPLAYS):
            again()

    return several


def _same(one: Any, many: Any, flat: Sequence[Any]) -> bool:
    """Whether both give the same bits, each time."""
    for _ in range(CHECKS):
        want, got = one(flat), many(flat)
        if want is None or got is None:
            return False
        for a, b in zip(want, got, strict=True):
            if isinstance(a, Tensor) and not _bits(a).equal(_bits(b)):
                return False
    return True


def _bits(t: Tensor) -> Tensor:
    """NaN equals itself only as bits."""
    return t.contiguous().reshape(-1).view(torch.uint8)
