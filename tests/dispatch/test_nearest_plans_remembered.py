# ruff: noqa: F811 (fixtures are imported)
"""What neighbours lend is found once, and again where anything that decides it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorlogic.core import policy
from tensorlogic.core.key import Key
from tensorlogic.dispatch import nearest_plans
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.plans import open_stores, store
from tensorlogic.plans.store import PlanStore

from ..support.plan_samples import CPU as HERE
from ..support.plan_samples import linear
from ..support.plan_samples import plan as sample
from ..support.plans import (
    CPU,
    RELU,
    Served,
    decided,
    key_of,
    plan,
    put,
    served,  # noqa: F401
)


def test_neighbours_are_asked_once_until_plans_or_candidates_change(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model's layers ask for one key again and again: a transformer's twelve did so 168 times for four."""
    asked: list[str] = []
    lent = nearest_plans.lent

    def counted(op: Any, key: Key, *more: Any) -> Any:
        asked.append(key.text)
        return lent(op, key, *more)

    monkeypatch.setattr(nearest_plans, "lent", counted)
    x, own = torch.randn(96, 64), key_of(torch.randn(96, 64)).text
    put(plan(key_of(torch.randn(128, 64)), "toy.a"))
    for _ in range(3):
        assert decided(x)[1] == "toy.a"
    assert asked == [own]
    put(plan(key_of(torch.randn(112, 64)), "toy.b"))  # nearer
    for _ in range(3):
        assert decided(x)[1] == "toy.b"
    assert asked == [own] * 2
    RELU.candidates["toy.b"] = replace(RELU.candidates["toy.b"], trusted=False)
    for _ in range(3):
        assert decided(x)[1] == "toy.a"
    assert asked == [own] * 3
    assert open_stores.current(CPU).forget() == 2
    assert decided(x)[0] in ("eager", "cost model")
    put(plan(key_of(x), "toy.a"))
    assert decided(x) == ("plan", "toy.a")
    assert asked == [own] * 4
    monkeypatch.setattr(store, "MEMO", 1)
    for n in (40, 48, 40, 48):
        decided(torch.randn(n, 64))
    assert len(asked) == 8


def test_what_failed_for_a_moment_is_asked_again(served: Served) -> None:
    """A candidate that could not list its configurations, or rates that could not be timed, are not remembered."""
    broken = [True]

    def configs(key: Key) -> Any:
        if broken[0]:
            raise RuntimeError("out of memory")
        return ({"BLOCK": 1}, {"BLOCK": 2})

    RELU.candidates["toy.a"] = replace(RELU.candidates["toy.a"], configs=configs)
    there = plan(key_of(torch.randn(128, 64)), "toy.a")
    there.eager_config = there.captured_config = {"BLOCK": 7}
    put(there)
    key = key_of(torch.randn(96, 64))

    def block() -> Any:
        return dispatch_selector.decide(RELU, key, CPU, policy.current()).eager[1]["BLOCK"]

    assert block() == 7
    broken[0] = False
    assert block() == 2
    broken[0] = True
    assert block() == 2  # remembered now


def test_plans_of_another_process_are_heard(tmp_path: Path) -> None:
    one, other = PlanStore(tmp_path, HERE), PlanStore(tmp_path, HERE)
    assert not one.memo()
    other.put(sample(linear(128, 128, 128)))
    assert other.flush()
    one.put(sample(linear(64, 64, 64)))
    memo = one.memo()
    memo["asked"] = None
    assert one.memo() is memo
    assert one.flush()  # which reads the other's
    assert one.memo() == {}
    assert one.forget(lambda p: p.key == linear(64, 64, 64)) == 1
    assert one.memo() is not memo
