"""Forward and backward behind one another: the pair that is fastest together is taken, and only where it wins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.autotune import measure_key, pair_tuning, tune
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.measure import timer, verification
from tensorlogic.plans import open_stores
from tensorlogic.plans.environment import environment
from tensorlogic.plans.plan import UNFINISHED, Evidence, Plan
from tensorlogic.system import compile_pool

from ..support.clockwork import Clock

CPU = torch.device("cpu")
FORWARD, BACKWARD = OPS["matmul"], OPS["matmul_backward"]


class Machine:
    """Launchers that take as long as is said of them, by what ran before; one in `declines` declines."""

    def __init__(self, clock: Clock, **us: float) -> None:
        self.clock, self.us, self.last, self.declines = clock, us, "", ""

    def take(self, name: str) -> bool:
        assert not torch.is_grad_enabled()
        self.clock.sleep(1e-6 * self.us.get(f"{self.last}_{name}", self.us[name]))
        self.last = name
        return name != self.declines


def planted(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    for op, names in (
        (FORWARD, ("eager", "quick")),
        (BACKWARD, ("plain", "ours", "other", "third", "fourth")),
    ):
        monkeypatch.setattr(op, "candidates", {})
        for name in names:
            id = EAGER if name in ("eager", "plain") else f"planted.{name}"

            @op.candidate(id)
            def launch(*args: Any, name: str = name) -> Any:
                return (torch.empty(0),) if machine.take(name) else None


def schema(monkeypatch: pytest.MonkeyPatch) -> None:
    for op in (FORWARD, BACKWARD):
        monkeypatch.setattr(op, "_check_schema", lambda id, fn: None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    names = ("eager", "quick", "plain", "ours", "other", "third", "fourth")
    made = Machine(Clock(), **dict.fromkeys(names, 300))
    made.clock.stands_in(monkeypatch, timer)
    schema(monkeypatch)
    planted(monkeypatch, made)
    return made


def keys(n: int = 8) -> tuple[Key, Key]:
    a, b = torch.ones(n, n), torch.ones(n, n)
    first = FORWARD.key((a, b, "none", True), "forward")
    return first, BACKWARD.key((a, a, b, None, "none", "11"), "backward")


def plan(key: Key, captured: str, **us: float) -> Plan:
    op = OPS[key.op]
    ids = {name: EAGER if name in ("eager", "plain") else f"planted.{name}" for name in us}
    evidence = [
        Evidence(
            ids[name],
            {"of": name},
            "measured",
            t,
            t,
            0.0,
            0.0,
            UNFINISHED,
            op.candidates[ids[name]].source,
        )
        for name, t in us.items()
    ]
    versions = environment(CPU).versions()
    own = {"of": next(name for name in us if ids[name] == captured)}
    return Plan(key, captured, own, captured, own, evidence, versions, "2026-01-01T00:00:00+00:00")


def settled(first: Plan, second: Plan, free: set[str] | None = None) -> list[str]:
    """Who is captured forward and backward, after both came to be known."""
    store = open_stores.current(CPU)
    mets = []
    for p in (first, second):
        store.put(p)
        mets.append((OPS[p.key.op], p.key, CPU))
    changed = pair_tuning.settle(mets[0], mets[1], free, 0.1)
    found = [store.get(p.key) for p in (first, second)]
    assert [p.eager for p in found if p] == [first.eager, second.eager]
    assert {p.key.text for p in changed} == {
        p.key.text
        for p, q in zip(found, (first, second), strict=True)
        if p and p.captured != q.captured
    }
    for p in found:
        assert p is not None
        own = next(e for e in p.evidence if e.candidate == p.captured)
        assert p.captured_config == own.config
    for p in changed:
        reasons = {e.candidate: e.reason for e in p.evidence}
        other = "forward pass" if p.key.direction == "backward" else "gradient"
        assert reasons[p.captured] == f"captured with its {other}, the fastest pair; {UNFINISHED}"
        assert p.incomplete
    return [p.captured for p in found if p]


def test_two_that_tie_alone_and_win_together_are_taken(machine: Machine) -> None:
    machine.us["quick_ours"] = 100
    first, second = keys()
    assert settled(
        plan(first, EAGER, eager=300, quick=301), plan(second, EAGER, plain=300, ours=302)
    ) == ["planted.quick", "planted.ours"]


def test_one_that_loses_in_company_makes_way(machine: Machine) -> None:
    """Ours forward, PyTorch's backward: each chosen for its own time, together slower than PyTorch's both."""
    machine.us["quick_plain"] = 600
    first, second = keys()
    assert settled(
        plan(first, "planted.quick", eager=300, quick=299), plan(second, EAGER, plain=300)
    ) == [EAGER, EAGER]


def test_what_is_chosen_stays_where_nothing_wins_by_the_tolerance(machine: Machine) -> None:
    machine.us["eager_plain"] = 297
    first, second = keys()
    assert settled(
        plan(first, "planted.quick", eager=300, quick=300),
        plan(second, "planted.ours", plain=300, ours=300, other=300),
    ) == ["planted.quick", "planted.ours"]


def test_ours_never_comes_behind_pytorchs_own_record(machine: Machine) -> None:
    """What PyTorch records it differentiates itself: a pair that cannot be is not timed."""
    machine.us["eager_ours"] = 10
    first, second = keys()
    plans = plan(first, EAGER, eager=300), plan(second, "planted.ours", plain=300, ours=290)
    assert settled(*plans) == [EAGER, "planted.ours"]
    assert machine.last == ""


def test_one_that_was_far_off_alone_is_not_timed(machine: Machine) -> None:
    machine.us["quick_other"] = 1
    first, second = keys()
    assert settled(
        plan(first, "planted.quick", quick=300),
        plan(second, "planted.ours", ours=300, other=400),
    ) == ["planted.quick", "planted.ours"]
    assert machine.last == ""


def test_only_the_nearest_few_are_timed(machine: Machine) -> None:
    machine.us.update(quick_fourth=1, quick_third=100)
    first, second = keys()
    many = {"fourth": 315, "other": 310, "third": 305, "ours": 300}
    assert settled(
        plan(first, "planted.quick", quick=300), plan(second, "planted.ours", **many)
    ) == ["planted.quick", "planted.third"]


def test_pytorchs_own_is_timed_however_slow_alone(machine: Machine) -> None:
    machine.us.update(quick_ours=600, eager_plain=100)
    first, second = keys()
    assert settled(
        plan(first, "planted.quick", eager=400, quick=300),
        plan(second, "planted.ours", plain=400, ours=300),
    ) == [EAGER, EAGER]


def test_what_was_settled_with_another_keeps_its_choice(machine: Machine) -> None:
    machine.us.update(quick_ours=100, eager_plain=10)
    first, second = keys()
    plans = (
        plan(first, "planted.quick", eager=300, quick=300),
        plan(second, "planted.other", plain=300, ours=300, other=300),
    )
    assert settled(*plans, free={second.text}) == ["planted.quick", "planted.ours"]
    assert settled(*plans, free={first.text}) == ["planted.quick", "planted.other"]
    assert settled(*plans) == [EAGER, EAGER]


def test_what_has_to_be_compiled_is_left(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.us["quick_ours"] = 1
    monkeypatch.setattr(compile_pool, "there", lambda jobs: "waits" not in jobs)
    late = OPS["matmul_backward"].candidates["planted.ours"]
    monkeypatch.setitem(
        BACKWARD.candidates, late.id, replace(late, jobs=lambda key, config, device: ["waits"])
    )
    first, second = keys()
    assert settled(
        plan(first, "planted.quick", quick=300), plan(second, EAGER, plain=300, ours=300)
    ) == ["planted.quick", EAGER]
    assert machine.last == ""


def test_one_that_won_by_chance_is_asked_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[list[str]] = []

    def samples(calls: dict[str, Any], *rest: Any) -> timer.Samples:
        looks.append(sorted(calls))
        us = {n: 90.0 if n == "1" and len(looks) == 1 else 100.0 for n in calls}
        return timer.Samples({n: [t] * 4 for n, t in us.items()})

    monkeypatch.setattr(timer, "device_samples", samples)
    first, second = keys()
    plans = (
        plan(first, "planted.quick", quick=300),
        plan(second, EAGER, plain=300, ours=300, other=300),
    )
    assert settled(*plans) == ["planted.quick", EAGER]
    assert looks == [["0", "1", "2"], ["0", "1"]]


def test_long_ones_are_not_timed(machine: Machine) -> None:
    first, second = keys()
    long = {"plain": 700, "ours": 700}
    assert settled(plan(first, EAGER, eager=310, quick=300), plan(second, EAGER, **long)) == [
        EAGER,
        EAGER,
    ]
    assert machine.last == ""


def test_one_that_has_changed_since_is_not_timed(machine: Machine) -> None:
    machine.us["quick_other"] = 1
    first, second = keys()
    stale = plan(second, "planted.ours", ours=300, other=300)
    stale.evidence[1] = replace(stale.evidence[1], source="of another day")
    assert settled(plan(first, "planted.quick", quick=300), stale) == [
        "planted.quick",
        "planted.ours",
    ]
    assert machine.last == ""


def test_one_that_fails_changes_nothing(machine: Machine) -> None:
    machine.us["quick_ours"], machine.declines = 1, "ours"
    first, second = keys()
    assert settled(
        plan(first, EAGER, eager=300, quick=301), plan(second, EAGER, plain=300, ours=302)
    ) == [EAGER, EAGER]


def test_which_keys_belong_together() -> None:
    x, w = torch.ones(4, 8), torch.ones(6, 8)
    first = OPS["linear"].key((x, w, None, None, "relu", True), "forward")
    other = OPS["linear"].key((x, w, None, None, "none", True), "forward")
    alone = OPS["linear"].key((x, w, None, None, "relu", False), "inference")
    y = torch.ones(4, 6)
    back = OPS["linear_backward"].key((y, x, w, y, "relu", "1100"), "backward")
    wider = OPS["linear_backward"].key(
        (y, torch.ones(4, 8).double(), w, y, "relu", "1100"), "backward"
    )
    met = [(OPS[k.op], k, CPU) for k in (alone, other, first, back, wider)]
    assert pair_tuning.pairs(met) == [(met[2], met[3])]
    apart = (met[3][0], back, torch.device("cuda", 1))
    assert pair_tuning.pairs([met[2], apart]) == []
    softmax = OPS["softmax"].key((x, 1, True), "forward")
    assert not pair_tuning.alike(softmax, OPS["softmax_backward"].key((x, x, 1), "backward"))


def test_forwards_that_backward_cannot_tell_apart_take_turns() -> None:
    x, w, b, y = torch.ones(4, 8), torch.ones(6, 8), torch.ones(6), torch.ones(4, 6)
    forward = [OPS["linear"].key((x, w, bias, None, "relu", True), "forward") for bias in (None, b)]
    needs = ("1110", "0110", "1100")
    backward = [OPS["linear_backward"].key((y, x, w, y, "relu", n), "backward") for n in needs]
    met = [(OPS[k.op], k, CPU) for k in (*forward, *backward)]
    found = [(f[1], s[1]) for f, s in pair_tuning.pairs(met)]
    assert found == list(zip((*forward, forward[0]), backward, strict=True))


def test_tune_settles_pairs_of_gpus_that_it_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def settle(forward: pair_tuning.Met, backward: pair_tuning.Met, free: set[str]) -> list[Plan]:
        assert free >= {forward[1].text, backward[1].text}
        asked.append((forward[1].text, backward[1].text))
        plan = open_stores.current(CPU).get(forward[1])
        assert plan is not None
        plan.captured = "torch.linear"
        return [plan]

    monkeypatch.setattr(pair_tuning, "settle", settle)
    a = torch.ones(8, 8, requires_grad=True)
    b = torch.ones(8, 8, requires_grad=True)
    learned = tensorlogic.tune(tensorlogic.matmul, a, b)
    assert not asked  # a CPU has no graphs
    gpu = torch.device("cuda")
    keys = [(OPS[p.key.op], p.key, gpu) for p in learned.plans]
    tune._together(keys, keys, learned)
    assert [(f.split()[0], s.split()[0]) for f, s in asked] == [("matmul", "matmul_backward")]
    assert {p.key.op: p.captured for p in learned.plans}["matmul"] == "torch.linear"
    tune._together(keys, [], tune.Learned(known=2))
    assert len(asked) == 1


def test_pairs_of_two_gpus_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = tensorlogic.tune(
        tensorlogic.matmul, torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    ).plans
    forward = next(p for p in plans if p.key.op == "matmul")

    def settle(first: pair_tuning.Met, second: pair_tuning.Met, free: set[str]) -> list[Plan]:
        assert free == {p.key.text for p in plans}
        return [replace(forward, captured=f"fastest on {first[2]}")]

    monkeypatch.setattr(pair_tuning, "settle", settle)
    gpus = [torch.device("cuda", i) for i in range(2)]
    keys = [(OPS[p.key.op], p.key, gpu) for gpu in gpus for p in plans]
    learned = tune.Learned([*plans, *plans])
    tune._together(keys, keys, learned)
    assert [p.captured for p in learned.plans if p.key.op == "matmul"] == [
        "fastest on cuda:0",
        "fastest on cuda:1",
    ]


def test_tune_settles_what_it_has_met(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(tune, "_together", lambda *args: given.append(args))
    learned = tensorlogic.tune(
        tensorlogic.matmul, torch.ones(8, 8, requires_grad=True), torch.ones(8, 8)
    )
    ((met, measured, same),) = given
    assert same is learned
    assert measured == met
    assert [key.op for _, key, _ in met] == ["matmul", "matmul_backward"]
    monkeypatch.setattr(open_stores, "distributed", lambda: True)
    monkeypatch.setattr(measure_key, "agreed", lambda *args: None)
    tensorlogic.tune(tensorlogic.matmul, torch.ones(9, 9, requires_grad=True), torch.ones(9, 9))
    assert len(given) == 1  # whose ranks' clocks differ


def test_the_tensors_of_a_pair_are_those_of_its_keys() -> None:
    """Real candidates, forward and backward, run behind one another on inputs of their own."""
    x, w = torch.randn(16, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True)
    learned = tensorlogic.tune(tensorlogic.linear, x, w, None, None, "relu")
    ((forward, backward),) = pair_tuning.pairs([(OPS[p.key.op], p.key, CPU) for p in learned.plans])
    seen: list[Tensor] = []
    for met in (forward, backward):
        near = pair_tuning._near(met, next(p for p in learned.plans if p.key == met[1]), True)
        assert near
        outs = pair_tuning._bound(met, near[0])(*verification.InputSet(*met, 0).fresh(met[0]))
        assert outs is not None
        seen += [o for o in outs if o is not None]
    assert (16, 6) in [tuple(o.shape) for o in seen]
    assert (16, 8) in [tuple(o.shape) for o in seen]
