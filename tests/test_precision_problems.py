"""Random products under error budgets, in the smaller form: badly scaled, huge, tiny, cancelling, sparse, one bad row."""

from __future__ import annotations

import runpy
from functools import partial
from pathlib import Path

import pytest
import torch

from tensorlogic import adapting

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "precision_problems.py"))


@pytest.mark.parametrize("seed", [1, 2])
def test_every_budget_is_kept_or_warned_of(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapting, "order", partial(SCRIPT["any_order"], seed=[seed]))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of which problems this small need no more
    try:
        found = [SCRIPT["solve"](i, seed, torch.device("cpu")) for i in range(40)]
    finally:
        torch.set_num_threads(threads)
    assert not [o for o in found if not o.good]
    assert sum(not o.warned for o in found) > 20
    assert len({o.way for o in found}) >= 5
