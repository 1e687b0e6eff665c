"""Decisions of optimize on disk: the next process measures nothing, and believes nothing that does not hold there."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler import program_search
from tensorlogic.compiler.runtime.codegen import Sites
from tensorlogic.compiler.tune import decision_store, region_tuner
from tensorlogic.compiler.verify import whole_model
from tensorlogic.core.candidate import Candidate
from tensorlogic.core.tolerance import Verdict
from tensorlogic.measure import timer
from tensorlogic.plans import open_stores
from tensorlogic.system import settings

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOTE = "by an earlier process"


@pytest.fixture(autouse=True)
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is right counts as faster, however long deciding takes here; Triton's interpreter is no candidate."""
    begun = region_tuner.Judge.__init__

    def patient(self: region_tuner.Judge, *given: Any) -> None:
        begun(self, *given)
        self.deadline = self.end = math.inf

    monkeypatch.setattr(region_tuner.Judge, "__init__", patient)
    plain = Candidate.unfit
    slow = DEVICE == "cpu"
    monkeypatch.setattr(
        Candidate,
        "unfit",
        lambda self, key: "slow" if slow and self.id.startswith("triton") else plain(self, key),
    )
    monkeypatch.setattr(program_search, "MUST_GAIN", 1e9)
    monkeypatch.setattr(region_tuner, "LEAST_GAIN", 1e9)
    monkeypatch.setattr(region_tuner, "USUAL_SHARE_S", 0.001)
    monkeypatch.setattr(timer.Samples, "ratio", lambda self, a, b: (0.5, 0.4, 0.6))


def model(width: int = 96) -> nn.Module:
    """A small network with regions of several kinds."""
    layers = (
        nn.Linear(64, width),
        nn.GELU(),
        nn.Linear(width, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 48),
    )
    return nn.Sequential(*layers, nn.ReLU()).to(DEVICE).eval()


def optimized(net: nn.Module, x: Tensor, **words: Any) -> nn.Module:
    """As a process that has just started would have it."""
    open_stores.forget()
    return tensorlogic.optimize(net, x, budget_s=words.pop("budget_s", 1.0), **words)


def earlier(fast: nn.Module) -> bool:
    return any(NOTE in note for note in fast.report.notes)


def file() -> Path:
    (found,) = (settings.cache_folder() / "programs").glob("*.json")
    return found


def x(rows: int = 32, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(rows, 64, device=DEVICE, dtype=dtype)


@torch.no_grad()
def test_the_next_process_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first = optimized(model(), x())
    assert first.report.outcome != "original"
    assert not earlier(first)

    def timed(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was timed")

    monkeypatch.setattr(timer, "wall_samples", timed)
    monkeypatch.setattr(timer, "device_samples", timed)
    other, given = model(), x()  # other weights, other inputs
    second = optimized(other, given)
    assert earlier(second)
    assert [r.cells for r in second.report.rows] == [r.cells for r in first.report.rows]
    assert second.report.outcome == first.report.outcome
    assert second._program is not None
    torch.testing.assert_close(second(given), other(given), rtol=1e-4, atol=1e-5)
    with torch.no_grad():  # and is no staler than a measured one
        other[0].weight.mul_(2.0)
    torch.testing.assert_close(second(given), other(given), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_next_process_waits_for_no_compiler_where_the_first_did_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bind = Sites.bind

    def hurried(self: Sites, name: str, *rest: Any) -> Any:
        self.hurried.add(name)
        return bind(self, name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Sites, "bind", hurried)
        first = optimized(model(), x())
    second = optimized(model(), x())
    assert earlier(second)
    assert first._program.function.sites.hurried
    assert second._program.function.sites.hurried == first._program.function.sites.hurried


@torch.no_grad()
@pytest.mark.parametrize(
    "change",
    [
        lambda m: (m, x(33), {}),
        lambda m: (m.double(), x(dtype=torch.float64), {}),
        lambda m: (model(80), x(), {}),
        lambda m: (m, x(), {"budget_s": 2.0}),
        lambda m: (m, x(), {"training": True}),
    ],
    ids=["rows", "dtype", "width", "budget", "training"],
)
def test_what_differs_is_measured(change: Any) -> None:
    optimized(model(), x())
    net, given, words = change(model())
    assert not earlier(optimized(net, given, **words))


@torch.no_grad()
def test_a_smaller_budget_takes_what_a_larger_one_found() -> None:
    optimized(model(), x(), budget_s=2.0)
    assert earlier(optimized(model(), x()))


@torch.no_grad()
def test_training_is_kept_too() -> None:
    net = model().train()
    optimized(net, x(), training=True)
    fast = optimized(net, x(), training=True)
    assert earlier(fast)
    with torch.enable_grad():
        given = x()
        (mine,) = torch.autograd.grad(fast(given).square().sum(), [net[0].weight])
        (plain,) = torch.autograd.grad(net(given).square().sum(), [net[0].weight])
    torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_nothing_pays_is_kept_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_search, "MUST_GAIN", 0.0)
    net = model()
    assert optimized(net, x()) is net
    again = optimized(net, x())
    assert again is net
    assert earlier(again)
    assert "nothing pays" in again.report.reason


@torch.no_grad()
def test_regions_serve_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized(model(), x())
    timed: list[str] = []
    plain = region_tuner.Judge._measure

    def counted(self: region_tuner.Judge, region: Any, *rest: Any) -> Any:
        timed.append(region.op)
        return plain(self, region, *rest)

    monkeypatch.setattr(region_tuner.Judge, "_measure", counted)
    longer = nn.Sequential(*model(), nn.Linear(48, 40), nn.ReLU()).to(DEVICE).eval()
    fast = optimized(longer, x())
    assert not earlier(fast)
    assert len(timed) == 1  # the new layer alone
    given = x()
    torch.testing.assert_close(fast(given), longer(given), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_is_wrong_here_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized(model(), x())
    plain, asked = whole_model.Whole.judge, []

    def once(self: whole_model.Whole, program: Any) -> Verdict:
        asked.append(program)
        return Verdict("wrong", 9.0) if len(asked) == 1 else plain(self, program)

    monkeypatch.setattr(whole_model.Whole, "judge", once)
    fast = optimized(model(), x())
    assert not earlier(fast)
    assert fast.report.outcome != "original"
    assert len(asked) > 1


@torch.no_grad()
def test_new_sources_and_new_plans_are_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    optimized(model(), x())
    with monkeypatch.context() as patch:
        patch.setattr(decision_store, "planned", lambda text, device: "2031-01-01")
        assert not earlier(optimized(model(), x()))
    optimized(model(), x())
    monkeypatch.setattr(decision_store, "code_version", lambda: "other")
    assert not earlier(optimized(model(), x()))


@torch.no_grad()
def test_policies_that_choose_are_neither_kept_nor_served() -> None:
    with tensorlogic.policy(deterministic=True):
        optimized(model(), x())
    assert not (settings.cache_folder() / "programs").exists()
    optimized(model(), x())
    with tensorlogic.policy(force="torch.eager"):
        assert not earlier(optimized(model(), x()))


@torch.no_grad()
@pytest.mark.parametrize("damage", ["truncated", "foreign", "other types", "empty", "folder"])
def test_damaged_files(damage: str, recwarn: pytest.WarningsRecorder) -> None:
    optimized(model(), x())
    path = file()
    text = path.read_text()
    document = json.loads(text)
    if damage == "truncated":
        path.write_text(text[: len(text) // 2])
    elif damage == "foreign":
        path.write_text('{"some": "other program\'s"}')
    elif damage == "other types":
        for record in document["plans"].values():
            record.update(ways=3, rows="none", paying=[], ready=None, row={"ratio": 1})
        path.write_text(json.dumps(document))
    elif damage == "empty":
        path.write_text("")
    else:
        path.unlink()
        path.mkdir()
    net, given = model(), x()
    fast = optimized(net, given)
    torch.testing.assert_close(fast(given), net(given), rtol=1e-4, atol=1e-5)
    if damage != "folder":
        assert not earlier(fast)
        assert earlier(optimized(net, given))  # and is whole again


@torch.no_grad()
def test_two_processes_lose_nothing() -> None:
    optimized(model(), x(32))
    stale = dict(decision_store._KNOWN)
    optimized(model(), x(34))
    decision_store._KNOWN.clear()
    decision_store._KNOWN.update(
        {p: dict(r) for p, r in stale.items()}
    )  # one that has read before that
    tensorlogic.optimize(model(), x(35), budget_s=1.0)
    for rows in (32, 34, 35):
        assert earlier(optimized(model(), x(rows)))


@torch.no_grad()
def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision_store, "MOST", 6)
    optimized(model(), x(32))
    optimized(model(), x(34))
    assert len(json.loads(file().read_text())["plans"]) == 6
    assert earlier(optimized(model(), x(34)))


def test_decisions_made_under_enable_hold_under_it_alone() -> None:
    disabled = decision_store.switches(torch.device("cpu"))
    tensorlogic.enable()
    try:
        assert decision_store.switches(torch.device("cpu")) != disabled
    finally:
        tensorlogic.disable()
    assert decision_store.switches(torch.device("cpu")) == disabled
