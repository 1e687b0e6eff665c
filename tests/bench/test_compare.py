"""Result files beside each other: compared, and verified by measuring again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tensorlogic.bench import cases, compare, measure_case, result_check
from tensorlogic.bench.result_file import OURS, Row
from tensorlogic.bench.terminal.user_error import Problem
from tensorlogic.cli import main

from ..support.bench import (
    held,
    made,
    run,
)
from ..support.bench import tiny as tiny  # a fixture


def test_compare_tells_better_worse_and_unchanged() -> None:
    before = held(
        made(10, 20, size=1),
        made(10, 20, size=2),
        made(10, 20, size=3),
        made(10, 20, size=4),
        made(10, 20, size=5),
    )
    after = held(
        made(13, 20, size=1),
        made(8, 20, size=2),
        made(10.1, 20, size=3),
        made(0, 0, size=4, status="refused"),
        made(10, 20, size=6),
    )
    found = compare.compare(before, after)
    assert {c.label[1]: c.verdict for c in found.changes} == {
        "1": "worse",
        "2": "better",
        "3": "unchanged",
        "4": "broken",
        "5": "gone",
        "6": "new",
    }
    assert [c.label[1] for c in found.regressions] == ["1", "4"]
    assert not compare.compare(before, before).regressions
    assert not compare.compare(held(made(10, 20)), held(made(13, 20)), margin=0.4).regressions
    assert "1 worse" in str(found)


def test_compare_cancels_drift_unless_told_not_to() -> None:
    before, after = held(made(10, 20)), held(made(15, 30))
    assert compare.compare(before, after).changes[0].verdict == "unchanged"
    assert compare.compare(before, after, absolute=True).changes[0].verdict == "worse"


def test_compare_looks_at_host_times_of_gpus() -> None:
    before, after = (
        held(made(10, 20, host=True), kind="cuda"),
        held(made(10, 20, host=True), kind="cuda"),
    )
    after.rows[0].host_us = made(14, 20).device_us
    assert [(c.label[3], c.verdict) for c in compare.compare(before, after).changes] == [
        ("device", "unchanged"),
        ("host", "worse"),
    ]


def test_compare_refuses_mixed_machines() -> None:
    before, after = held(made(10, 20)), held(made(10, 20), device="B")
    with pytest.raises(Problem, match="device: A before, B after"):
        compare.compare(before, after)
    assert "device: A before, B after" in compare.compare(before, after, mixed=True).differences
    assert compare.compare(before, held(made(10, 20), torch_version="2.14.0")).differences == [
        "torch: 2.13.0 before, 2.14.0 after"
    ]
    with pytest.raises(Problem, match="no row in common"):
        compare.compare(before, held(made(10, 20, size=7)))
    with pytest.raises(Problem, match="margin is -1"):
        compare.compare(before, before, margin=-1)


def test_a_file_is_verified_by_measuring_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    known = run(path, ops=["add", "relu", "add_relu"], sizes=[64], dtypes=["f32"])
    for row in known.rows:
        row.device_us = made(10, 20).device_us | {b: [20.0] * 7 for b in row.baselines}
    known.write(path)
    again: list[str] = []

    def now(case: cases.Case, device: torch.device, effort: measure_case.Effort) -> Row:
        again.append(case.id)
        row = next(r for r in known.rows if r.id == case.id)
        ours = [v * (2 if "relu" in case.op else 1) for v in row.device_us[OURS]]
        return replace(row, device_us={**row.device_us, OURS: ours})

    monkeypatch.setattr(measure_case, "measured", now)
    found = result_check.verify(path)
    assert {c.id for c in found.held} == {"elementwise add 64 f32"}
    assert {c.verdict for c in found.failed} == {"worse"}
    assert again.count("elementwise add 64 f32") == 1
    assert again.count("activation relu 64 f32") == result_check.ATTEMPTS
    assert "1 of 3 rows hold" in str(found)
    assert main.main(["bench", "--verify", str(path)]) == 1
    assert "relu" in capsys.readouterr().out
    known.machine["environment"]["device"] = "another"
    known.write(path)
    assert main.main(["bench", "--verify", str(path)]) == 2
    assert "of another machine" in capsys.readouterr().err


def test_a_sample_has_every_category() -> None:
    many = held(*[replace(made(1, 1, size=n), id=str((c, n)), category=c) for n in range(9) for c in cases.CATEGORIES])  # fmt: skip
    chosen = result_check.sample(many)
    assert len(chosen) == result_check.SAMPLE
    assert {r.category for r in chosen} == set(cases.CATEGORIES)
    assert [r.id for r in result_check.sample(many)] == [r.id for r in chosen]
