"""How transfers are cut and shared among threads is timed once a machine, and repeats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tensorlogic
from tensorlogic import stores
from tensorlogic.memory import staging, staging_rules
from tensorlogic.memory.staging_rules import MIB, Rule

CPU = torch.device("cpu")
FOREVER = float("inf")


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_rules, "processors", lambda: 16)


def test_each_size_gets_the_threads_and_the_chunks_that_are_fastest() -> None:
    def timer(rule: Rule, nbytes: int) -> float:
        threads = {16 * MIB: 5, 64 * MIB: 13}[nbytes]
        slow = 1.0 + 0.02 * abs(rule.workers - threads) + 0.1 * (rule.least != MIB)
        return slow * nbytes

    small, large = staging_rules.chosen(timer, FOREVER)
    assert small == Rule(5, MIB, 4 * MIB)
    assert large == Rule(13, MIB, 4 * MIB)


def test_what_is_hardly_better_changes_nothing() -> None:
    usual = staging_rules.usual()
    found = staging_rules.chosen(lambda rule, _: 1.0 - 0.002 * (rule not in usual), FOREVER)
    assert found == usual
    assert staging_rules.chosen(lambda rule, _: float(rule in usual), 0.0) == usual  # no time


def test_few_processors_have_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging_rules, "processors", lambda: 2)
    met: set[int] = set()
    staging_rules.chosen(lambda rule, _: [1.0, met.add(rule.workers)][0] or 1.0, FOREVER)
    assert met == {1}


def test_what_was_found_is_noted_and_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path))
    stores.forget()
    try:
        assert staging_rules.known(CPU, True) is None
        found = staging_rules.settle(CPU, True, lambda rule, _: float(rule.workers))
        assert found[0].workers == found[1].workers == 5
        stores.forget()  # as another process
        assert staging_rules.known(CPU, True) == found
        assert staging_rules.known(CPU, False) is None
        (path,) = tmp_path.rglob("*.transfers")
        text = path.read_text()
        for spoilt in (text.replace(" 5 ", " 99 "), text.replace(" 5 ", " x "), text[:-9] + "\n"):
            path.write_text(spoilt)
            stores.forget()
            assert staging_rules.known(CPU, True) is None
    finally:
        monkeypatch.undo()
        stores.forget()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_machine_finds_its_rules_after_a_few_transfers() -> None:
    host = torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8)
    for _ in range(staging.MET + 1):
        there = tensorlogic.to(host, "cuda")
        assert torch.equal(tensorlogic.to(there, "cpu"), host)
    for up in (True, False):
        mover = staging.stager(0, up)
        assert mover.left == 0
        assert staging_rules.known(mover.device, up) == mover.rules
