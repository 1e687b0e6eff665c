"""Inductor as a competitor in optimize: only within an explicit budget, only where right and faster, and always said."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.inductor import background_compile, comparison, compile_process
from tensorlogic.compiler.reporting.report import Report, Row
from tensorlogic.compiler.trace import compiled_call
from tensorlogic.guards import errors
from tensorlogic.plans import open_stores
from tests.support.inductor_fakes import DEVICE, Chain, Fake, Normed, same, x


def row(report: Report) -> Row:
    (found,) = (r for r in report.rows if r.op == comparison.OP)
    return found


@torch.no_grad()
def test_the_faster_one_serves(fake: Fake) -> None:
    model = Chain().to(DEVICE).eval()
    fast = tensorlogic.optimize(model, x(), budget_s=30)
    assert fast.report.outcome == "compiled"
    assert row(fast.report).refused == ""
    assert row(fast.report).ratio == pytest.approx((5 / 7,) * 3)  # beside what was found before
    assert fast.report.ratio == pytest.approx((0.5,) * 3)  # beside the original
    assert all(r.refused for r in fast.report.rows if r.op != comparison.OP)
    given = x()
    same(fast(given), model(given))
    assert fast._program((given,), {}) is not errors.MISS
    with torch.no_grad():
        model.w.mul_(2.0)
    same(fast(given), model(given))  # weights are read, not kept
    same(fast(given[:5]), model(given[:5]))  # other sizes: the model's own code
    assert "torch.inductor" in str(fast.report)


@torch.no_grad()
def test_the_slower_one_does_not(fake: Fake) -> None:
    fake.us = 6.95
    fast = tensorlogic.optimize(Chain().to(DEVICE).eval(), x(), budget_s=30)
    assert fast.report.outcome in ("rewritten", "captured")
    assert row(fast.report).refused == "does not pay"
    assert row(fast.report).ratio is not None


@torch.no_grad()
def test_what_is_wrong_is_refused(fake: Fake) -> None:
    fake.scale = 1.01
    model = Chain().to(DEVICE).eval()
    fast = tensorlogic.optimize(model, x(), budget_s=30)
    assert fast.report.outcome in ("rewritten", "captured")
    assert "wrong" in row(fast.report).refused
    given = x()
    same(fast(given), model(given))


def test_where_nothing_of_ours_pays(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorlogic.compiler.program_search.MUST_GAIN", 0.0)
    model = Chain().to(DEVICE)
    fast = tensorlogic.optimize(model, x(), training=True, budget_s=30)
    assert fast.report.outcome == "compiled"
    assert row(fast.report).before_us == 10.0
    given = x()
    grads = [
        torch.autograd.grad(sum(v.square().sum() for v in m(given).values()), [*m.parameters()])
        for m in (fast, model)
    ]
    same(*grads)
    fake.us = 10.0
    open_stores.forget()
    shutil.rmtree(tensorlogic.system.settings.cache_folder())
    assert tensorlogic.optimize(model, x(), training=True, budget_s=30) is model
    assert row(model.report).refused == "does not pay"


def test_buffers_are_written_once_a_call(fake: Fake) -> None:
    model = Normed().to(DEVICE).train()
    before = [b.clone() for b in model.buffers()]
    fast = tensorlogic.optimize(model, x(), training=True, budget_s=30)
    assert fast.report.outcome == "compiled"
    same([*fast.buffers()], before)  # by neither checking nor timing
    given = x()
    expected = Normed().to(DEVICE).train()
    expected.load_state_dict(model.state_dict())
    same(fast(given), expected(given))
    same([*fast.buffers()], [*expected.buffers()])
    assert fast.bn.num_batches_tracked == 1


def test_buffers_that_are_not_written_are_noticed(fake: Fake) -> None:
    fake.writes = False
    fast = tensorlogic.optimize(Normed().to(DEVICE).train(), x(), training=True, budget_s=30)
    assert "wrong" in row(fast.report).refused


@torch.no_grad()
def test_only_an_explicit_budget_lets_it_compete(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = tensorlogic.optimize(Chain().to(DEVICE).eval(), x())
    assert not [r for r in fast.report.rows if r.op == comparison.OP]
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "0")
    tensorlogic.optimize(Chain().to(DEVICE).eval(), torch.randn(7, 32, device=DEVICE), budget_s=30)
    assert fake.started == 0
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "1")
    fast = tensorlogic.optimize(Chain().to(DEVICE).eval(), x()[:5], budget_s=4.0)
    assert "were left" in row(fast.report).refused
    assert fake.started == 0


def test_random_numbers_are_refused(fake: Fake) -> None:
    model = nn.Sequential(nn.Linear(32, 48), nn.Dropout(0.5), nn.Linear(48, 8)).to(DEVICE)
    fast = tensorlogic.optimize(model, x(), training=True, budget_s=30)
    assert "random" in row(fast.report).refused
    assert fake.started == 0


@torch.no_grad()
def test_the_next_process_loads_it(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Chain().to(DEVICE).eval()
    tensorlogic.optimize(model, x(), budget_s=30)
    open_stores.forget()
    other, given = Chain().to(DEVICE).eval(), x()
    fast = tensorlogic.optimize(other, given)  # no budget is needed to load
    assert fast.report.outcome == "compiled"
    assert fake.started == 1
    same(fast(given), other(given))
    open_stores.forget()
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "0")
    assert tensorlogic.optimize(other, given).report.outcome != "compiled"
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "1")
    open_stores.forget()
    tensorlogic.optimize(other, given, budget_s=30)
    assert fake.started == 2
    fake.graphs.clear()
    open_stores.forget()
    fast = tensorlogic.optimize(other, given, budget_s=30)  # gone: it is made anew
    assert fast.report.outcome == "compiled"
    assert fake.started == 3


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The background begins after ten calls (of 7 us, as the fake says)."""
    monkeypatch.setattr("tensorlogic.compiler.optimize.BUDGET_S", 60.0)  # on a busy machine, too
    monkeypatch.setattr(background_compile, "EARNED_S", 70e-6)
    monkeypatch.setattr(background_compile, "LOOK_S", 7e-6)
    monkeypatch.setattr(background_compile, "FIXED_S", 0.0)
    monkeypatch.setattr(background_compile, "_imported", lambda: None)
    monkeypatch.setattr(background_compile, "_BEGUN", weakref.WeakSet())
    with tensorlogic.policy(tune="auto"):
        yield


@torch.no_grad()
def test_in_the_background_it_takes_over(
    fake: Fake, soon: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Chain().to(DEVICE).eval()
    fast = tensorlogic.optimize(model, x())
    assert fast.report.outcome in ("rewritten", "captured")
    given, fake.ended = x(), False
    waiting = fast._program
    for _ in range(9):
        same(fast(given), model(given))
    assert fake.started == 0  # nothing is earned yet
    for _ in range(9):
        same(fast(given), model(given))
    same(fast(given[:7]), model(given[:7]))
    assert fake.started == 1
    assert fast._program is waiting  # it still compiles
    fake.ended = True
    for _ in range(20):
        same(fast(given), model(given))
    assert (
        fast._program is waiting
    )  # comparing costs 60 calls of 10 us, a twentieth of what is done
    monkeypatch.setattr(background_compile, "SHARE", 1e9)
    waiting.look_at = 0
    with torch.inference_mode():  # a call of any kind may compare
        same(fast(given), model(given))
    assert fast.report.outcome == "compiled"
    assert fast._program is not waiting
    same(fast(given), model(given))
    assert "background" in str(fast.report)
    open_stores.forget()
    fast = tensorlogic.optimize(model, given)  # a later process begins with it
    assert fast.report.outcome == "compiled"
    assert fake.started == 1
    assert not isinstance(fast._program, background_compile.Later)


@torch.no_grad()
@pytest.mark.parametrize("failure", ["no compiler", ""])
def test_in_the_background_it_may_lose(
    fake: Fake, soon: None, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.setattr(background_compile, "SHARE", 1e9)
    model, given = Chain().to(DEVICE).eval(), x()
    fast = tensorlogic.optimize(model, given)
    fake.failure, fake.us = failure, 8.0
    for _ in range(20):
        same(fast(given), model(given))
    assert fake.started == 1
    assert row(fast.report).refused == (failure or "does not pay")
    assert not isinstance(fast._program, background_compile.Later)
    assert fast.report.outcome in ("rewritten", "captured")
    open_stores.forget()
    again = tensorlogic.optimize(model, given)
    assert not isinstance(again._program, background_compile.Later)  # it has been tried
    assert row(again.report).refused == (failure or "does not pay")


@torch.no_grad()
def test_what_waits_ends_with_its_model(fake: Fake, soon: None) -> None:
    given, fake.ended = x(), False
    fast = tensorlogic.optimize(Chain().to(DEVICE).eval(), given)
    for _ in range(12):
        fast(given)
    assert fake.started == 1
    assert fake.stopped == 0
    del fast
    gc.collect()
    assert fake.stopped == 1


@torch.no_grad()
def test_nothing_waits_where_nothing_is_to_be_measured(fake: Fake, soon: None) -> None:
    with tensorlogic.policy(tune="off"):
        fast = tensorlogic.optimize(Chain().to(DEVICE).eval(), x())
        assert not isinstance(fast._program, background_compile.Later)


@torch.no_grad()
def test_graphs_travel_with_all_their_arguments(fake: Fake) -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor, flag: bool = True) -> tuple[Tensor, list[Tensor]]:
            parts = torch.split(x, [3, 5, 24], dim=-1)
            rows = torch.arange(x.shape[0], device=x.device, dtype=torch.float32)
            y = torch.cat([parts[0], parts[2]], dim=1).to(torch.float64).float()
            return y + rows[:, None], [parts[1].amax(dim=(0, 1), keepdim=True), x[1:-1:2]]

    model, given = Odd().eval(), x()
    fast = tensorlogic.optimize(model, (given, True), budget_s=30)
    assert fast.report.outcome == "compiled", fast.report
    same(fast(given, True), model(given, True))


def test_a_compilation_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    trace = traced(Chain().eval())
    job = compile_process.Compiling(trace, tmp_path / "a.artifact", False)
    job.wait(0.01)
    with pytest.raises(compile_process.Unable, match="not compiled in the 0 s"):
        job.made()
    assert job.process.returncode is not None
    assert not (tmp_path / "a.artifact").exists()


def traced(model: nn.Module) -> Any:
    from tensorlogic.compiler.trace.exporter import trace

    with torch.no_grad():
        return trace(model.to(DEVICE), (x(),), {})


@pytest.mark.slow
@pytest.mark.skipif(DEVICE != "cpu", reason="GPU code needs no C++ compiler")
def test_without_a_compiler_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    job = compile_process.Compiling(traced(Chain().eval()), tmp_path / "a.artifact", False)
    job.wait(120)
    with pytest.raises(compile_process.Unable, match=r"(?i)compiler"):
        job.made()


@torch.no_grad()
def test_an_interrupt_ends_the_compiler_and_reaches_the_caller(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_process.Compiling, "wait", interrupted)
    model, given = Chain().to(DEVICE).eval(), x()
    want = model(given)
    with pytest.raises(KeyboardInterrupt):
        tensorlogic.optimize(model, given, budget_s=30)
    assert fake.stopped == 1
    same(model(given), want)


def test_what_refuses_its_inputs_says_so() -> None:
    def strict(*given: Any) -> Any:
        raise AssertionError("expected stride 1")

    with pytest.raises(RuntimeError, match=r"compiled by Inductor.*expected stride 1"):
        compiled_call.Compiled(strict, False)(torch.ones(1))
