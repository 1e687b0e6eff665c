"""What rewriting left over, by Inductor: run by run, only where right and clearly faster, and always said."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tensorlogic
from tensorlogic.compiler import program_search
from tensorlogic.compiler.inductor import background_compile, comparison, compile_process
from tensorlogic.compiler.reporting.report import Report, Row
from tensorlogic.compiler.runtime.program import Program
from tensorlogic.compiler.verify.whole_model import Whole
from tensorlogic.core.tolerance import Verdict
from tensorlogic.plans import open_stores
from tests.support.inductor_fakes import (
    DEVICE,
    Fake,
    Tails,
    graded,
    left,
    same,
    tails,
    x,
)

from ...support.inductor_fakes import ours as ours  # a fixture


def whole(report: Report) -> Row:
    (found,) = (r for r in report.rows if r.op == comparison.OP)
    return found


@torch.no_grad()
def test_what_is_left_over_is_compiled_between_our_products(fake: Fake) -> None:
    fake.left_us, fake.us = 4.0, 6.0
    model = tails()
    fast = tensorlogic.optimize(model, x(), budget_s=30)
    report = fast.report
    assert report.outcome in ("rewritten", "captured")
    assert [(r.candidate, r.refused) for r in left(report)] == [("torch.inductor", "")] * 2
    assert sorted(r.count for r in left(report)) == [1, 2]  # the chain is compiled once
    assert all(r.ratio == (0.5, 0.4, 0.6) and r.error is not None for r in left(report))
    assert [r for r in report.regions if r.op == "linear"]
    assert whole(report).refused == "does not pay"
    assert report.ratio == pytest.approx((0.4,) * 3)
    assert "left over" in str(report)
    targets = [str(n.target) for n in fast._program.graph.nodes if n.op == "call_function"]
    assert targets.count("inductor") == 3
    assert not any(name in t for t in targets for name in ("sin", "exp", "softmax"))
    given = x()
    same(fast(given), model(given))
    model.w.mul_(2.0)
    model.b.weight.mul_(0.5)
    same(fast(given), model(given))  # weights are read, not kept
    same(fast(given[:5]), model(given[:5]))  # other sizes: the model's own code


@torch.no_grad()
def test_the_whole_model_by_inductor_may_be_faster_still(fake: Fake) -> None:
    fake.left_us, fake.us = 6.0, 4.0
    fast = tensorlogic.optimize(tails(), x(), budget_s=30)
    assert fast.report.outcome == "compiled"
    assert whole(fast.report).before_us == 6.0  # beside the best so far
    assert {r.refused for r in left(fast.report)} == {"Inductor is faster"}


@torch.no_grad()
@pytest.mark.parametrize("ratio", [(1.2, 1.1, 1.3), (0.9, 0.7, 1.05)])
def test_runs_that_are_not_clearly_faster_stay(
    fake: Fake, ratio: tuple[float, float, float]
) -> None:
    fake.run_ratio, fake.left_us, fake.us = ratio, 1.0, 9.0
    fast = tensorlogic.optimize(tails(), x(), budget_s=30)
    assert [r.refused for r in left(fast.report)] == ["does not pay"] * 2
    assert fast._program.left_over == []


@torch.no_grad()
def test_runs_that_do_not_pay_together_stay(fake: Fake) -> None:
    fake.left_us, fake.us = 6.95, 9.0
    fast = tensorlogic.optimize(tails(), x(), budget_s=30)
    assert {r.refused for r in left(fast.report)} == {"in the whole model: does not pay"}
    assert fast._program.left_over == []
    assert fast.report.after_us == 7.0


@torch.no_grad()
def test_a_wrong_run_is_undone_and_named(fake: Fake) -> None:
    fake.left_us, fake.us = 4.0, 9.0
    planted: list[Path] = []

    def scale(artifact: Path) -> float:
        planted.extend([] if planted else [artifact])
        return 1.01 if artifact in planted else 1.0

    fake.left_scale = scale
    model, given = tails(), x()
    fast = tensorlogic.optimize(model, given, budget_s=30)
    (bad,) = (r for r in left(fast.report) if r.refused)
    assert "wrong" in bad.refused
    assert bad.region in str(fast.report)
    assert planted[0].stem not in fast._program.left_over
    assert len(fast._program.left_over) == 1
    same(fast(given), model(given))


@torch.no_grad()
def test_a_run_by_which_the_whole_error_grows_is_undone(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.left_us, fake.us = 4.0, 9.0
    plain = Whole.judge

    def judge(self: Whole, program: Program) -> Verdict:
        return Verdict(None, 9.0) if len(program.left_over) == 2 else plain(self, program)

    monkeypatch.setattr(Whole, "judge", judge)
    fast = tensorlogic.optimize(tails(), x(), budget_s=30)
    (bad,) = (r for r in left(fast.report) if r.refused)
    assert bad.refused == "the whole model's error grew: error 9.00 times the original's"
    assert len(fast._program.left_over) == 1


@torch.no_grad()
def test_runs_may_pay_where_our_rewrites_alone_do_not(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_search, "MUST_GAIN", 0.0)
    fake.left_us, fake.us = 4.0, 9.0
    fast = tensorlogic.optimize(tails(), x(), budget_s=30)
    assert fast.report.outcome in ("rewritten", "captured")
    assert len(fast._program.left_over) == 2


@torch.no_grad()
def test_a_later_process_loads_them(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.left_us, fake.us = 4.0, 9.0
    first = tensorlogic.optimize(tails(), x(), budget_s=30)
    model, given = tails(), x()
    open_stores.forget()
    fast = tensorlogic.optimize(model, given)  # no budget is needed to load
    assert fast._program.left_over == first._program.left_over
    assert fake.started == 1
    assert [r.refused for r in left(fast.report)] == ["", ""]
    same(fast(given), model(given))
    open_stores.forget()
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "0")
    plain = tensorlogic.optimize(model, given)
    assert not getattr(plain, "_program", plain).__dict__.get("left_over")
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "1")
    shutil.rmtree(tensorlogic.system.settings.cache_folder())
    open_stores.forget()
    tensorlogic.optimize(model, given, budget_s=30)
    fake.graphs.clear()
    open_stores.forget()
    fast = tensorlogic.optimize(model, given, budget_s=30)  # gone: made anew
    assert len(fast._program.left_over) == 2
    assert fake.started == 3


@torch.no_grad()
def test_in_the_background(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_compile, "EARNED_S", 0.0)
    monkeypatch.setattr(background_compile, "LOOK_S", 0.0)
    monkeypatch.setattr(background_compile, "SHARE", 1e9)
    monkeypatch.setattr(background_compile, "_imported", lambda: None)
    monkeypatch.setattr(background_compile, "_BEGUN", weakref.WeakSet())
    fake.left_us, fake.us = 4.0, 9.0
    model, given = tails(), x()
    with tensorlogic.policy(tune="auto"):
        fast = tensorlogic.optimize(model, given)
        with torch.inference_mode():  # a call of any kind may begin and compare
            for _ in range(6):
                same(fast(given), model(given))
    assert len(fast._program.left_over) == 2
    assert "background" in str(fast.report)
    open_stores.forget()
    again = tensorlogic.optimize(model, given)
    assert again._program.left_over == fast._program.left_over


@torch.no_grad()
def test_an_interrupt_ends_the_compilers_and_reaches_the_caller(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_process.Compiling, "wait", interrupted)
    model, given = tails(), x()
    want = model(given)
    with pytest.raises(KeyboardInterrupt):
        tensorlogic.optimize(model, given, budget_s=30)
    assert fake.stopped == 2
    same(model(given), want)


def test_gradients_go_through_runs(fake: Fake) -> None:
    fake.left_us, fake.us = 4.0, 9.0
    model, given = Tails().to(DEVICE), x()
    fast = tensorlogic.optimize(model, given, training=True, budget_s=30)
    assert [r.refused for r in left(fast.report)] == ["", ""], fast.report
    assert len(fast._program.left_over) == 2
    same(graded(fast, given), graded(model, given))
    with torch.no_grad():
        model.w.mul_(2.0)
    same(graded(fast, given), graded(model, given))


def test_nothing_is_cut_out_of_what_draws_or_writes(fake: Fake) -> None:
    drops = nn.Sequential(nn.Linear(32, 48), nn.Dropout(0.5), nn.Tanh(), nn.Softmax(-1))
    writes = nn.Sequential(nn.Linear(32, 48), nn.BatchNorm1d(48), nn.Tanh(), nn.Softmax(-1))
    for model in (drops, writes):
        before = [b.clone() for b in model.to(DEVICE).buffers()]
        fast = tensorlogic.optimize(model, x(), training=True, budget_s=30)
        assert left(fast.report) == []
        same([*fast.buffers()], before)


@torch.no_grad()
def test_what_was_not_compiled_in_time_is_named(fake: Fake) -> None:
    fake.failure = "not compiled in the 3 s that were left"
    fast = tensorlogic.optimize(tails(), x(), budget_s=30)
    assert {r.refused for r in left(fast.report)} == {fake.failure}
    assert fast._program.left_over == []
