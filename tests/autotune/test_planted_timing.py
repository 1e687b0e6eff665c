"""Planted candidates that are slow, disturbed or fail late: each is timed for what it is, and the others with it.

In time that moves as the test works and as planted ones sleep, not while something else has the core.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import tensorlogic
from tensorlogic.autotune import ranking, tuner
from tensorlogic.measure import timer, verification
from tensorlogic.plans.plan import Evidence, Plan

from ..support.clockwork import Work
from ..support.plans import (
    Install,
    inputs,
    reasons,
)
from ..support.plans import install as install  # a fixture


@pytest.fixture
def timed(
    install: Install, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], tuple[Plan, Evidence]]:
    """Plants a candidate that does this before it is right; the plan and what it says of it."""
    monkeypatch.setattr(tuner, "CUT", 3.0)  # which the plug-in is installed without
    clock = Work()
    clock.stands_in(monkeypatch, timer, tuner, verification)

    def tuned(first: str) -> tuple[Plan, Evidence]:
        body = textwrap.indent(textwrap.dedent(first), "    ")
        install(extra=f"def odd(*a):\n{body}\n    return (right(*a),)\nplant('odd', odd)\n")
        clock.stands_in(monkeypatch, sys.modules["planted_candidates"])
        (plan,) = tensorlogic.tune(tensorlogic.linear, *inputs()).plans
        (evidence,) = [e for e in plan.evidence if e.candidate == "planted.odd"]
        return plan, evidence

    return tuned


def test_one_whose_first_calls_are_slow_is_timed_all_the_same(timed: Any) -> None:
    _, evidence = timed(
        """
        COUNT[0] += 1
        if COUNT[0] <= 2:
            time.sleep(0.004)
        """
    )
    assert 0 < evidence.host_us < 1000


def test_one_that_was_disturbed_for_some_calls_is_timed_all_the_same(timed: Any) -> None:
    """Compilers that have the cores delay several calls in a row by a quarter of a millisecond."""
    _, evidence = timed(
        """
        COUNT[0] += 1
        if COUNT[0] <= 12:
            time.sleep(0.00025)
        """
    )
    assert evidence.status == "measured"
    assert evidence.device_us < 150


def test_a_slow_one_is_cut_after_few_calls(timed: Any) -> None:
    plan, evidence = timed(
        """
        COUNT[0] += 1
        time.sleep(0.02)
        """
    )
    assert evidence.reason.startswith("cut after one call")
    assert sys.modules["planted_candidates"].COUNT[0] <= 2
    assert plan.eager != "planted.odd"


def test_one_that_fails_in_the_final_leaves_the_others_in_it(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        extra="""
        def faints(*a):
            if KEPT.get("final"):
                raise Peculiar("worn out")
            return (right(*a),)
        plant("faints", faints)
        """
    )
    decide = tuner.KeyTuner._decide

    def final(self: tuner.KeyTuner, present: Any) -> None:
        sys.modules["planted_candidates"].KEPT["final"] = True
        decide(self, present)

    monkeypatch.setattr(tuner.KeyTuner, "_decide", final)
    monkeypatch.setattr(ranking, "FINALISTS", 99)
    (plan,) = tensorlogic.tune(tensorlogic.linear, *inputs()).plans
    assert reasons(plan)["faints"] == "failed: Peculiar: worn out"
    assert len([e for e in plan.evidence if e.status == "measured"]) > 1
