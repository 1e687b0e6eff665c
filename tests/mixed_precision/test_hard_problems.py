"""Random products under error budgets, in the smaller form: badly scaled, huge, tiny, cancelling, sparse, one bad row."""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tensorlogic.mixed_precision import adaptive, candidate_order

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "precision_problems.py"))


@pytest.mark.parametrize("seed", [1, 2])
def test_every_budget_is_kept_or_warned_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "order", partial(SCRIPT["any_order"], seed=[seed]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of which problems this small need no more
    try:
        found = [SCRIPT["solve"](i, seed, torch.device("cpu")) for i in range(40)]
    finally:
        torch.set_num_threads(threads)
    assert not [o for o in found if not o.good]
    assert sum(not o.warned for o in found) > 20
    assert len({o.way for o in found}) >= 5


def test_workers_share_by_shape_and_dtype() -> None:
    found = SCRIPT["shares"](200, 3, 5)
    assert sorted(i for share in found for i in share) == list(range(200))
    whose: dict[object, set[int]] = {}
    for n, share in enumerate(found):
        assert share
        for i in share:
            p = SCRIPT["drawn"](i, 3)
            whose.setdefault((p.shape, p.dtype), set()).add(n)
    assert all(len(workers) == 1 for workers in whose.values())


def test_what_was_found_is_kept_when_it_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(adaptive, "order", candidate_order.order)  # which the script changes
    result = tmp_path / "problems.json"
    arguments = ["--count", "1000", "--seconds", "0.2", "--json", str(result)]
    monkeypatch.setattr(sys, "argv", ["precision_problems.py", *arguments])
    assert SCRIPT["main"]() == 0
    found = json.loads(result.read_text())
    assert 0 < found["count"] < 1000
    assert not found["complete"]
    assert found["broken"] == 0
    assert found["count"] == json.loads(capsys.readouterr().out.splitlines()[-1])["count"]
