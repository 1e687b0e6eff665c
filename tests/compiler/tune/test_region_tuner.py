"""Regions: which way stands, what gives way where the whole model's error grew, and how long losers are timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx, nn

import tensorlogic
from tensorlogic.compiler import program_search
from tensorlogic.compiler.reporting.report import Row
from tensorlogic.compiler.rewrite.matcher import Region, again, rewrite
from tensorlogic.compiler.rewrite.rule_set import RULES
from tensorlogic.compiler.runtime import program as runtime_program
from tensorlogic.compiler.runtime.codegen import Sites
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.compiler.tune import precompile, region_graph, region_tuner
from tensorlogic.compiler.tune.decision_store import Decision
from tensorlogic.compiler.tune.region_graph import CHOSEN, Fragment
from tensorlogic.compiler.tune.region_tuner import HEATS, raced
from tensorlogic.compiler.verify import whole_model as verify_whole_model
from tensorlogic.core import policy as core_policy
from tensorlogic.core.candidate import Candidate
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.core.tolerance import Verdict
from tensorlogic.dispatch import bound_call, candidate_loading
from tensorlogic.dispatch import decision as dispatch_decision
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.measure import timer
from tensorlogic.ops.convolution import CONVOLUTION
from tensorlogic.plans import open_stores
from tensorlogic.system import compile_pool

from ...support.clockwork import Clock


def row(way: str, ratio: float, error: float) -> Row:
    return Row("r", "op", way, 1, 100.0, 100 * ratio, (ratio, ratio, ratio), error)


def test_the_fastest_of_the_clearly_milder_ways_comes_next() -> None:
    ways = {w: row(w, *v) for w, v in {"a": (0.5, 3), "b": (0.7, 1.5), "c": (0.6, 2.9)}.items()}
    ways["d"] = row("d", 0.9, 1.0)
    decision = Decision("a", ("a", "b", "c", "d"), row("a", 0.5, 3), ways)
    seen = []
    while decision.milder():
        seen.append((decision.way, decision.row.candidate, decision.row.error))
    assert seen == [("b", "b", 1.5), ("d", "d", 1.0)]
    assert decision.ready == ("d",)
    assert not Decision("a", ("a",), row("a", 0.5, 3), {"a": row("a", 0.5, 3)}).milder()


@torch.no_grad()
def test_another_way_takes_the_place_of_one_that_makes_the_whole_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge = verify_whole_model.Whole.judge
    tried = []

    def strict(self: verify_whole_model.Whole, program: runtime_program.Program) -> Verdict:
        """As if only the plain form of a convolution were right enough in the whole."""
        names = [str(getattr(n.target, "__name__", n.target)) for n in program.function.nodes]
        tried.append("convolution" in names)
        found = judge(self, program)
        return found if tried[-1] else Verdict(found.reason, 3.0)

    def milder(self: Decision) -> bool:
        """Over to the plain form, if that is not what stands."""
        before, self.way, self.ready = self.way, "torch.eager", ("torch.eager",)
        return before != "torch.eager"

    monkeypatch.setattr(verify_whole_model.Whole, "judge", strict)
    monkeypatch.setattr(Decision, "milder", milder)
    monkeypatch.setattr(program_search, "MUST_GAIN", 1e9)
    monkeypatch.setattr("tensorlogic.compiler.tune.region_tuner.LEAST_GAIN", 1e9)
    monkeypatch.setattr(timer.Samples, "ratio", lambda self, a, b: (0.5, 0.4, 0.6))
    median = timer.Samples.median
    slow = {"before", "torch.eager"}
    monkeypatch.setattr(
        timer.Samples, "median", lambda s, n: median(s, n) * (1e6 if n in slow else 1)
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
    fast = tensorlogic.optimize(model, torch.randn(2, 3, 8, 8), budget_s=0.2)
    assert tried[0] is False
    assert tried[-1] is True
    assert fast.report.outcome == "rewritten", fast.report
    assert [r.op for r in fast.report.regions] == ["convolution"]


@torch.no_grad()
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="PyTorch without oneDNN")
def test_a_way_too_inexact_for_a_region_is_not_tried_on_its_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judge, made, tried = verify_whole_model.Whole.judge, region_graph.Fragment, []
    monkeypatch.setattr("tensorlogic.compiler.optimize.BUDGET_S", 60.0)  # also beside other work

    def strict(self: verify_whole_model.Whole, program: runtime_program.Program) -> Verdict:
        found = judge(self, program)
        wrong = "onednn.packed" in program.ways.values()
        return Verdict(found.reason, 3.0) if wrong else found

    def fragment(region: Region, way: str | None, env: Any) -> Fragment:
        tried.append((region.root, way))
        return made(region, way, env)

    monkeypatch.setattr(verify_whole_model.Whole, "judge", strict)
    monkeypatch.setattr(region_tuner, "Fragment", fragment)
    monkeypatch.setattr(Decision, "milder", lambda self: False)
    monkeypatch.setattr(program_search, "MUST_GAIN", 1e9)
    monkeypatch.setattr("tensorlogic.compiler.tune.region_tuner.LEAST_GAIN", 1e9)
    monkeypatch.setattr(timer.Samples, "ratio", lambda self, a, b: (0.5, 0.4, 0.6))

    def times(calls: dict[str, Any], device: torch.device) -> dict[str, timer.Samples]:
        """oneDNN's way is the fastest, whatever the machine does beside."""
        took = {name: [1.0 if "onednn" in name else 2.0] * 6 for name in calls}
        return dict.fromkeys(calls, timer.Samples(took))

    monkeypatch.setattr(region_tuner, "raced", times)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    fast = tensorlogic.optimize(nn.Sequential(*layers).eval(), torch.randn(2, 3, 8, 8))
    whole = [root for root, way in tried if way == "onednn.packed"]
    assert len(whole) == 1, tried
    assert len({root for root, _ in tried}) > 1  # its parts were tried by other ways
    assert fast.report.outcome == "rewritten", fast.report


@torch.no_grad()
def test_a_rewritten_graph_is_copied_with_its_regions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    graph = trace(model, (torch.randn(2, 3, 8, 8),), {}).graph
    regions = rewrite(graph, RULES)
    copied, same = again(graph)
    assert [r.calls for r in same] == [r.calls for r in regions]
    for mine, theirs in zip(same, regions, strict=True):
        assert mine.node is not None
        assert mine.node.graph is copied
        assert theirs.node is not None
        assert theirs.node.graph is graph
        assert mine.node.target is CONVOLUTION


def test_losers_leave_the_race_early(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.stands_in(monkeypatch, timer)

    def taking(seconds: float) -> list[Callable[[], Any]]:
        return [lambda: clock.sleep(seconds)]

    def timed(**seconds: float) -> dict[str, timer.Samples]:
        return raced({n: taking(s) for n, s in seconds.items()}, torch.device("cpu"))

    found = timed(before=0.004, fast=0.0038, other=0.005, slow=0.012)
    assert len(found["slow"].values["slow"]) == 1
    assert len(found["other"].values["other"]) == HEATS
    assert len(found["fast"].values["fast"]) > HEATS
    assert found["slow"].ratio("slow", "before")[0] > 1 > found["fast"].ratio("fast", "before")[0]
    assert found["other"].ratio("other", "before")[0] > 1
    assert len(timed(before=0.004, fast=0.002)["fast"].values["fast"]) == HEATS  # no doubt is left


@torch.no_grad()
def test_what_is_timed_is_what_will_run() -> None:
    graph = fx.Graph()
    places = [graph.placeholder(n) for n in ("x", "w", "b")]
    values = {"x": torch.ones(4, 64), "w": torch.ones(8, 64), "b": torch.ones(8)}
    for place in places:
        place.meta = {"val": values[place.name], "constant": False}
    node = graph.call_function(tensorlogic.dropout_linear, (*places, 0.5))
    node.meta = {"val": torch.empty(4, 8)}
    fragment = Fragment(Region("dropout_linear", node.name, frozenset(), node=node), CHOSEN, values)
    assert (fragment.run_checked() == 65).all()  # nothing is dropped out while it is checked
    fragment.arrive(training=False)
    assert not (fragment.function.run(*fragment.values) == 65).all()


def test_a_candidate_is_not_forced_on_what_it_cannot_run() -> None:
    a = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    b = torch.randn(2, 8, 4, 4)
    candidate_loading.ready("cpu")
    key = tensorlogic.add_relu.fused.key((a, b, False), "inference")  # type: ignore[attr-defined]
    unfit = [c for c in tensorlogic.add_relu.fused.candidates.values() if c.unfit(key)]  # type: ignore[attr-defined]
    if not unfit:
        pytest.skip("every candidate here takes such tensors")
    policy = core_policy.current()
    sites = Sites({"call": unfit[0].id})  # chosen for tensors that lay otherwise
    run = sites.bind("call", tensorlogic.add_relu, (a, b))
    assert run is not None
    torch.testing.assert_close(run(a, b), torch.relu(a + b))
    with pytest.MonkeyPatch.context() as patch:
        asked: list[str | None] = []
        bound = bound_call.Bound.__init__

        def seen(self: bound_call.Bound, *given: Any) -> None:
            asked.append(given[-1].force)
            bound(self, *given)

        patch.setattr(bound_call.Bound, "__init__", seen)
        sites.bind("call", tensorlogic.add_relu, (a, b))
    assert asked == [policy.force]


def test_a_forced_forward_leaves_its_backward_to_the_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, w = (torch.randn(n, 32, requires_grad=True) for n in (16, 8))
    candidate_loading.ready("cpu")
    op = tensorlogic.linear.fused  # type: ignore[attr-defined]
    ready = (*tensorlogic.linear.__wrapped__(x, w, None, None, "relu"), True)  # type: ignore[attr-defined]
    fits = [c.id for c in op.candidates.values() if c.unfit(op.key(ready, "forward")) is None]
    asked: list[core_policy.Policy] = []
    bound = bound_call.Bound.__init__

    def seen(self: bound_call.Bound, *given: Any) -> None:
        asked.append(given[-1])
        bound(self, *given)

    monkeypatch.setattr(bound_call.Bound, "__init__", seen)
    for id in fits:
        run = Sites({"call": id}).bind("call", tensorlogic.linear, (x, w, None, None, "relu"))
        assert run is not None
        run(x, w, None, None, "relu").sum().backward()
        assert asked[0].forced("linear") == id
        assert {p.forced("linear_backward") for p in asked} == {None}
        asked.clear()


@torch.no_grad()
def test_a_call_that_waited_for_no_compiler_does_not_later(monkeypatch: pytest.MonkeyPatch) -> None:
    hurried: list[bool] = []

    def decide(*_: Any) -> dispatch_decision.Decision:
        hurried.append(compile_pool.new_compiles_forbidden())
        source = dispatch_decision.NO_NEW_COMPILES if hurried[-1] else "neighbour"
        return dispatch_decision.Decision(("torch.eager", {}), ("torch.eager", {}), source)

    monkeypatch.setattr(dispatch_selector, "decide", decide)
    sites, args = Sites(), (torch.randn(16, 32), torch.randn(8, 32), None, None, "relu")
    with compile_pool.no_new_compiles():
        sites.bind("call", tensorlogic.linear, args)
    for name in ("call", "other"):
        sites.bind(name, tensorlogic.linear, args)
    assert hurried == [True, True, False]
    assert sites.hurried == {"call"}


@torch.no_grad()
def test_what_composites_call_waits_for_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops that stand in the model themselves do, until the time for it is over."""
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.ReLU(), nn.Flatten(), nn.Linear(32, 8), nn.ReLU())
    seen: dict[tuple[str, bool], set[bool]] = {}
    begun, measured = region_tuner.Judge.__init__, region_tuner.Judge._measure

    def patient(self: region_tuner.Judge, *given: Any) -> None:
        begun(self, *given)
        self.deadline = self.end = math.inf

    def watched(self: region_tuner.Judge, region: Region, *rest: Any) -> Decision:
        late = self.deadline == 0.0
        seen.setdefault((region.op, late), set()).add(compile_pool.new_compiles_forbidden())
        found = measured(self, region, *rest)
        self.deadline = 0.0
        return found

    monkeypatch.setattr(region_tuner.Judge, "__init__", patient)
    monkeypatch.setattr(region_tuner.Judge, "_measure", watched)
    for first in (net, net[2:]):  # the one that is decided first has time left
        open_stores.forget()
        x = torch.randn(4, 4, 2, 2) if first is net else torch.randn(6, 8, 2, 2)
        tensorlogic.optimize(first.eval(), x, budget_s=0.5)
    assert seen["convolution", False] == {True}
    assert seen["linear", True] == {True}
    assert seen["linear", False] == {False}


def test_small_images_are_turned_rather_than_large_weights() -> None:
    w, how = torch.randn(32, 16, 3, 3), (None, "none", (1, 1), (1, 1), (1, 1), 1)
    for side, turned in ((6, True), (32, False)):
        x = torch.randn(1, 16, side, side)
        laid = x.contiguous(memory_format=torch.channels_last)
        y = CONVOLUTION(laid, w, None, *how)
        torch.testing.assert_close(y, torch.conv2d(x, w, None, padding=1), rtol=1e-4, atol=1e-4)
        assert y.is_contiguous() == turned
        assert CONVOLUTION(x, w, None, *how).is_contiguous()
        adjacent = w.contiguous(memory_format=torch.channels_last)
        assert not CONVOLUTION(laid, adjacent, None, *how).is_contiguous()


@dataclass(frozen=True)
class Kernel:
    """A compile job that lasts as long as the test likes."""

    name: str


@torch.no_grad()
@pytest.mark.parametrize("arrives", [False, True])
def test_regions_whose_kernels_are_there_are_decided_first(
    arrives: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kernels are begun before the first region is decided; none is waited for while another region can go on."""
    begun: list[Kernel] = []
    dropped: list[Kernel] = []
    order: list[str] = []
    ready: set[Kernel] = set()
    one = region_tuner.Judge._one

    def decided(self: region_tuner.Judge, region: Region, env: Any) -> Decision:
        assert {"24", "16"} <= {k.name for k in begun}
        order.append(region.root)
        ready.update(begun if arrives else ())
        return one(self, region, env)

    def jobs(op: Any, key: Key, device: torch.device) -> list[Kernel]:
        outputs = key.tensors[1].shape[0]  # type: ignore[union-attr]
        return [Kernel(str(outputs))] if outputs in (16, 24) else []

    monkeypatch.setattr(region_tuner.Judge, "_one", decided)
    monkeypatch.setattr(precompile, "jobs", jobs)
    monkeypatch.setattr(region_tuner, "slowness", lambda row: 0.5)  # every region stands
    monkeypatch.setattr(program_search.equivalence, "GROWTH", 1e9)
    monkeypatch.setattr(compile_pool, "elsewhere", lambda: True)
    monkeypatch.setattr(compile_pool, "begin", begun.extend)
    monkeypatch.setattr(compile_pool, "submit", begun.extend)
    monkeypatch.setattr(compile_pool, "there", lambda jobs: ready.issuperset(jobs))
    monkeypatch.setattr(compile_pool, "drop", dropped.extend)
    layers = [f for m, n in ((8, 24), (24, 8), (8, 16)) for f in (nn.Linear(m, n), nn.ReLU())]  # fmt: skip
    model = nn.Sequential(*layers).eval()
    x = torch.randn(4, 8)
    fast = tensorlogic.optimize(model, x)
    late = ["relu_2"] if arrives else []
    assert order == ["relu_1", *late, "relu", *([] if arrives else ["relu_2"])]
    assert begun == dropped == [Kernel("24"), Kernel("16")]
    torch.testing.assert_close(fast(x), model(x))


def test_kernels_of_the_plan_and_of_its_rivals_are_known_before_they_are_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rivals are compiled only where the plan does not tell of all candidates; what fails to list its kernels has none."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    def rival(id: str, jobs: Any) -> Candidate:
        return Candidate(
            id, fails, configs=lambda key: [{"n": 1}, {"n": 2}], jobs=jobs, trusted=True
        )

    op = OPS["linear"]
    own = {
        c.id: c
        for c in (
            op.candidates["torch.eager"],
            rival("a", lambda key, config, device: [f"a{config['n']}"]),
            rival("b", lambda key, config, device: [f"b{config['n']}"]),
            rival("broken", fails),
        )
    }
    monkeypatch.setattr(op, "candidates", own)
    x = torch.randn(4, 8)
    key = op.key((x, x, None, None, "none", False), "inference")
    plan = dispatch_decision.Decision(("b", {"n": 2}), ("broken", {}), "plan")
    monkeypatch.setattr(dispatch_selector, "decide", lambda *_: plan)
    complete = False
    monkeypatch.setattr(precompile.measure_key, "complete", lambda *_: complete)
    assert precompile.jobs(op, key, x.device) == ["b2"]
    assert [(c.id, jobs) for c, jobs in precompile.rivals(op, key, x.device)] == [
        ("a", ["a1"]),
        ("b", ["b1"]),
    ]
    complete = True
    assert not list(precompile.rivals(op, key, x.device))
