"""Candidates that must not be believed, planted by a real plug-in: refused with their reason, never returned to a caller."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic
from tensorlogic.autotune import background_tuning
from tensorlogic.core import policy
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.plans import open_stores
from tensorlogic.plans.environment import environment
from tensorlogic.plans.lockfile import export_lockfile
from tensorlogic.plans.plan import Evidence, Plan

from ..support.plans import (
    CPU,
    WRONG,
    Install,
    inputs,
    reasons,
)
from ..support.plans import install as install  # a fixture

FIVE = ("off_by_one_row", "stale_output", "f16_accumulation", "odd_sizes", "nan_in_one")


def assert_right(out: Tensor, x: Tensor, w: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(
        out.double(), F.linear(x.double(), w.double(), b.double()), rtol=4e-3, atol=4e-3
    )


def test_the_plug_in_is_found_and_not_trusted(install: Install) -> None:
    install("off_by_one_row")
    x, w, b = inputs()
    assert tensorlogic.candidates(tensorlogic.linear, x, w, b)["planted.off_by_one_row"] is None
    assert not OPS["linear"].candidates["planted.off_by_one_row"].trusted


def test_tune_refuses_each_with_its_reason(install: Install) -> None:
    install(*WRONG)
    x, w, b = inputs()
    (plan,) = tensorlogic.tune(tensorlogic.linear, x, w, b).plans
    found = reasons(plan)
    for name, (_, reason) in WRONG.items():
        assert reason in found.get(name, "not refused"), name
    assert not plan.eager.startswith("planted")
    assert not plan.captured.startswith("planted")
    with tensorlogic.policy(tune="auto"):
        for _ in range(3):
            assert_right(tensorlogic.linear(x, w, b), x, w, b)
    text = str(tensorlogic.explain(tensorlogic.linear, x, w, b))
    assert "refused: wrong: output 0 has 1 NaN" in text


def test_a_candidate_that_writes_does_not_spoil_the_others(install: Install) -> None:
    install("writes_input", extra="plant('fine', lambda *a: (right(*a),))")
    x, w, b = inputs()
    (plan,) = tensorlogic.tune(tensorlogic.linear, x, w, b).plans
    assert "fine" not in reasons(plan)
    assert "torch.widened" not in reasons(plan)


def test_full_tuning_never_returns_one(install: Install) -> None:
    install(*FIVE)
    x, w, b = inputs()
    with tensorlogic.policy(tune="full"):
        for _ in range(3):
            assert_right(tensorlogic.linear(x, w, b), x, w, b)
    plan = open_stores.current(CPU).get(key(x, w, b))
    assert plan is not None
    assert set(FIVE) <= reasons(plan).keys()


def key(x: Tensor, w: Tensor, b: Tensor) -> Key:
    return OPS["linear"].key((x, w, b, None, "none", False), "inference")


def test_background_tuning_never_returns_one(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(*FIVE, "raises", "asserts")
    monkeypatch.setattr(background_tuning, "SHARE", 1e9)
    x, w, b = inputs()
    with tensorlogic.policy(tune="auto"):
        for _ in range(4000):
            out = tensorlogic.linear(x, w, b)
            plan = open_stores.current(CPU).get(key(x, w, b))
            if plan is not None:
                break
        for _ in range(20):
            out = tensorlogic.linear(x, w, b)
            assert_right(out, x, w, b)
    assert plan is not None, "the key was never measured"
    assert set(FIVE) <= reasons(plan).keys()


@pytest.mark.parametrize("name", [n for n in WRONG if not n.endswith("later") or n.startswith("w")])
def test_forcing_one_raises_its_reason_or_falls_back(install: Install, name: str) -> None:
    install(name)
    x, w, b = inputs()
    with tensorlogic.policy(force=f"planted.{name}"):
        if WRONG[name][1].startswith(("wrong", "has", "a later", "declined", "changed")):
            with pytest.raises(
                dispatch_selector.Refused, match=r"refused on linear inference x=f16\[8,64\]"
            ):
                tensorlogic.linear(x, w, b)
        else:
            assert_right(tensorlogic.linear(x, w, b), x, w, b)


def test_one_that_is_right_for_a_neighbour_serves_only_that(install: Install) -> None:
    fast = "def _fast(x, weight, bias, residual, activation, save):\n    return F.linear(x, weight, bias)"
    install("odd_sizes", extra=fast)
    even, odd = inputs(n=16), inputs(n=15)
    assert tensorlogic.tune(tensorlogic.linear, *even).plans[0].evidence
    plan = open_stores.current(CPU).get(key(*even))
    assert plan is not None
    assert "odd_sizes" not in reasons(plan)
    plan.eager = plan.captured = "planted.odd_sizes"
    open_stores.current(CPU).put(plan)
    policy.forget_entries()
    for tune in ("off", "auto"):
        with tensorlogic.policy(tune=tune):
            assert_right(tensorlogic.linear(*odd), *odd)
            near = inputs(m=16, n=16)  # a kin of the measured key
            choice = dispatch_selector.decide(OPS["linear"], key(*near), CPU, policy.current())
            assert not choice.eager[0].startswith("planted")


def test_one_that_fails_after_it_was_chosen_leaves_the_call_to_eager(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("declines_later")
    planted = OPS["linear"].candidates["planted.declines_later"]
    x, w, b = inputs()
    for save in (False, True):
        args = (x, w, b, None, "none", save)
        plan = Plan(
            key=OPS["linear"].key(args, "forward" if save else "inference"),
            eager=planted.id,
            eager_config={},
            captured=planted.id,
            captured_config={},
            evidence=[Evidence(planted.id, {}, "measured", source=planted.source)],
        )
        open_stores.current(CPU).put(plan)
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            assert_right(tensorlogic.linear(x, w, b), x, w, b)
        sys.modules["planted_candidates"].COUNT[0] = 0
        leaf = x.clone().requires_grad_()
        for _ in range(12):
            assert_right(tensorlogic.linear(leaf, w, b).detach(), x, w, b)
    said = [r.message for r in caplog.records if "declined" in r.message]
    assert len(said) == 1
    assert max(len(bucket) for bucket in policy.current().entries.values()) <= 3


def test_one_that_is_wrong_on_unaligned_memory_never_sees_it(install: Install) -> None:
    install(
        extra="""
        def picky(*a):
            y = right(*a)
            return (y * 0 if a[0].data_ptr() & 15 else y,)
        plant('picky', picky)
        """
    )
    x, w, b = inputs()
    shifted = torch.cat([torch.zeros(1, dtype=x.dtype), x.view(-1)])[1:].view_as(x)
    assert shifted.data_ptr() & 15
    with tensorlogic.policy(force="planted.picky"):
        assert_right(tensorlogic.linear(x, w, b), x, w, b)
        with pytest.raises(dispatch_selector.Refused):
            tensorlogic.linear(shifted, w, b)
    (plan,) = tensorlogic.tune(tensorlogic.linear, x, w, b).plans
    plan.eager = plan.captured = "planted.picky"
    open_stores.current(CPU).put(plan)
    policy.forget_entries()
    for _ in range(3):
        assert_right(tensorlogic.linear(x, w, b), x, w, b)
        assert_right(tensorlogic.linear(shifted, w, b), x, w, b)


def test_a_locked_one_is_checked_here_too(
    install: Install, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    install("off_by_one_row")
    x, w, b = inputs()
    (plan,) = tensorlogic.tune(tensorlogic.linear, x, w, b).plans
    planted = OPS["linear"].candidates["planted.off_by_one_row"]
    plan.eager = plan.captured = planted.id
    for e in plan.evidence:
        if e.candidate == planted.id:
            e.status, e.reason = "measured", "a lie"
    export_lockfile(tmp_path / "lock.json", [plan], [environment(CPU)])
    with tensorlogic.policy(lockfile=tmp_path / "lock.json"), caplog.at_level(logging.WARNING):
        assert_right(tensorlogic.linear(x, w, b), x, w, b)
    assert any("off_by_one_row" in r.message for r in caplog.records)


def test_one_whose_questions_fail_is_refused_by_name(install: Install) -> None:
    install(
        extra="""
        def fails(*a):
            raise Peculiar("no answer")
        plant("asks", lambda *a: (right(*a),), supports=fails)
        plant("lists", lambda *a: (right(*a),), configs=fails)
        plant("lists_nothing", lambda *a: (right(*a),), configs=lambda key: ())
        plant("compiles", lambda *a: (right(*a),), jobs=fails)
        """
    )
    x, w, b = inputs()
    (plan,) = tensorlogic.tune(tensorlogic.linear, x, w, b).plans
    found = reasons(plan)
    assert "Peculiar: no answer" in found["asks"]
    assert "Peculiar: no answer" in found["lists"]
    assert "no configuration" in found["lists_nothing"]
    assert "Peculiar: no answer" in found["compiles"]
    for name in ("asks", "lists", "lists_nothing"):
        with tensorlogic.policy(force=f"planted.{name}"):
            assert_right(tensorlogic.linear(x, w, b), x, w, b)


def test_a_plug_in_that_fails_to_load_is_named_and_harmless(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        install(extra="raise ImportError('half installed')")
    assert any("half installed" in r.message and "planted" in r.message for r in caplog.records)
    assert_right(tensorlogic.linear(*(given := inputs())), *given)
