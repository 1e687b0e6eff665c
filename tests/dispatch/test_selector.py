"""Who serves a call: the order of the choice, reproducible modes, training steps."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER, Candidate, Config
from tensorlogic.core.key import Key
from tensorlogic.dispatch import decision, nearest_plans
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.measure import timer
from tensorlogic.plans import open_stores
from tensorlogic.plans import store as plans
from tensorlogic.plans.environment import environment
from tensorlogic.plans.lockfile import export_lockfile
from tensorlogic.plans.plan import Evidence, Plan
from tensorlogic.system import compile_pool
from tensorlogic.system.compile_pool import CompileFailure

from ..support.plans import (
    CPU,
    RELU,
    Served,
    decided,
    key_of,
    plan,
    put,
    toy,
)
from ..support.plans import nothing_measured as nothing_measured  # a fixture
from ..support.plans import served as served  # a fixture

TILES = {"products": ({"BLOCK_M": 64},)}


def source(x: Tensor, **changes: Any) -> str:
    with tensorlogic.policy(**changes):
        return dispatch_selector.decide(RELU, key_of(x), CPU, policy.current()).source


def test_order_forced_stored_neighbour_guess_eager(served: Served) -> None:
    x, other = torch.randn(64, 64), torch.randn(128, 64)
    for c in list(RELU.candidates.values()):
        RELU.candidates[c.id] = replace(c, guess=lambda key: 1.0)
    assert source(x) == "eager"
    RELU.candidates["toy.b"] = replace(RELU.candidates["toy.b"], guess=lambda key: 0.1)
    assert source(x) == "cost model"
    assert tensorlogic.relu(x) is not None
    assert served == ["toy.b"]
    put(plan(key_of(other), "toy.a"))
    assert source(x).startswith("neighbour relu inference x=f32[128,64]")
    assert source(torch.randn(64, 63)) == "cost model"  # of another divisibility
    put(plan(key_of(x), "toy.a"))
    assert decided(x) == ("plan", "toy.a")
    with tensorlogic.policy(force="toy.b"):
        assert decided(x) == ("forced", "toy.b")
    with tensorlogic.policy(force={"relu": EAGER}):
        assert decided(x) == ("forced", EAGER)
    with tensorlogic.policy(force={"gelu": "toy.b"}):
        assert decided(x) == ("plan", "toy.a")


def test_in_a_hurry_nothing_is_compiled_for_what_nobody_has_measured(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, other = torch.randn(64, 64), torch.randn(128, 64)
    for c in list(RELU.candidates.values()):
        RELU.candidates[c.id] = replace(c, guess=lambda key: 1.0)
    compiles: dict[str, Any] = {"jobs": lambda *_: ["kernel"], "guess": lambda key: 0.1}
    RELU.candidates["toy.a"] = replace(RELU.candidates["toy.a"], **compiles)
    RELU.candidates["toy.b"] = replace(RELU.candidates["toy.b"], guess=lambda key: 0.2)
    with compile_pool.no_new_compiles():
        assert decided(x) == (decision.NO_NEW_COMPILES, "toy.b")
    assert decided(x) == ("cost model", "toy.a")
    put(plan(key_of(other), "toy.a"))
    with compile_pool.no_new_compiles():
        assert decided(x) == (decision.NO_NEW_COMPILES, "toy.b")
        tensorlogic.relu(x)
    tensorlogic.relu(x)
    assert served == ["toy.b", "toy.a"]  # nothing of the hurry is kept
    with compile_pool.no_new_compiles():
        RELU.candidates["toy.b"] = replace(RELU.candidates["toy.b"], **compiles)
        assert decided(x) == (decision.NO_NEW_COMPILES, EAGER)
        with monkeypatch.context() as patch:
            patch.setattr(compile_pool, "_own", {"kernel"})  # as if it had been compiled
            assert decided(x)[0].startswith("neighbour relu inference x=f32[128,64]")
        put(plan(key_of(x), "toy.a"))
        assert decided(x) == ("plan", "toy.a")


def test_a_shipped_plan_comes_after_a_stored_one_and_before_a_neighbour(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(64, 64)
    monkeypatch.setattr(plans, "SHIPPED", tmp_path / "shipped")
    export_lockfile(
        tmp_path / "shipped" / "cpu.json", [plan(key_of(x), "toy.b")], [environment(CPU)]
    )
    open_stores.forget()
    put(plan(key_of(torch.randn(128, 64)), "toy.a"))
    assert decided(x) == ("plan", "toy.b")
    put(plan(key_of(x), "toy.a"))
    assert decided(x) == ("plan", "toy.a")


def test_a_plan_whose_winner_has_changed_does_not_count(served: Served) -> None:
    x = torch.randn(8, 8)
    put(plan(key_of(x), "toy.a"))
    assert decided(x)[0] == "plan"
    RELU.candidates["toy.a"] = replace(RELU.candidates["toy.a"], sources=(sum,))
    assert decided(x)[0] != "plan"


def test_a_neighbour_is_not_followed_to_a_candidate_refused_here(served: Served) -> None:
    x, other = torch.randn(64, 64), torch.randn(128, 64)
    here = plan(key_of(x), "toy.b")
    here.evidence.append(
        Evidence("toy.a", {}, "refused", reason="wrong: x", source=RELU.candidates["toy.a"].source)
    )
    put(plan(key_of(other), "toy.a"), here)
    RELU.candidates["toy.b"] = replace(RELU.candidates["toy.b"], sources=(sum,))
    assert decided(x)[1] != "toy.a"


@pytest.mark.parametrize(
    ("took", "config", "rows", "who"),
    [
        (0.85, TILES, 256, "toy.a"),  # a doubling away: 0.85 * 1.1
        (0.95, TILES, 256, EAGER),
        (0.9, TILES, 128, "toy.a"),  # as near as kin can be
        (0.97, {"products": ({"rank": 1},)}, 256, "toy.a"),  # a library's own guess
        (0.97, {}, 256, "toy.a"),
        (0.99, {}, 256, EAGER),
    ],
)
def test_a_neighbour_is_followed_where_its_gain_outweighs_its_distance(
    served: Served, took: float, config: Config, rows: int, who: str
) -> None:
    known = key_of(torch.randn(128, 64))
    times = {EAGER: 10.0, "toy.a": 10.0 * took}
    store = open_stores.current(CPU)
    store.put(
        replace(
            plan(known, "toy.a"),
            eager_config=config,
            captured_config=config,
            evidence=[
                Evidence(id, {}, "measured", us, us / 2, source=RELU.candidates[id].source)
                for id, us in times.items()
            ],
        )
    )
    asked = key_of(torch.randn(rows, 64) if rows != 128 else torch.randn(136, 64))
    found = dispatch_selector.decide(RELU, asked, CPU, policy.current())
    assert found.source.startswith("neighbour")
    assert (found.eager[0], found.captured[0]) == (who, who)


def test_a_neighbours_configuration_that_does_not_exist_here_gives_way_to_one_that_does(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    tried: list[Config] = []

    def bind(key: Key, config: Config, device: torch.device) -> Any:
        tried.append(config)
        if config["tile"] > key.tensors[0].shape[0]:  # type: ignore[union-attr]
            raise CompileFailure(f"no {config['tile']} rows")
        return lambda x: (torch.relu(x),)

    RELU.add(
        Candidate(
            "toy.tiled",
            bind=bind,
            trusted=True,
            sources=(len,),
            configs=lambda key: [{"tile": n} for n in (32, 64, 128)],
        )
    )
    x, other = torch.randn(64, 64), torch.randn(128, 64)
    put(replace(plan(key_of(other), "toy.tiled"), eager_config={"tile": 128}))
    with tensorlogic.policy(tune="off"):
        assert torch.equal(tensorlogic.relu(x), torch.relu(x))
        assert tried == [{"tile": 128}, {"tile": 32}]
        assert "failed on" not in caplog.text
        RELU.candidates["toy.tiled"] = replace(
            RELU.candidates["toy.tiled"], configs=lambda key: [{"tile": 256}]
        )
        policy.forget_entries()
        assert torch.equal(tensorlogic.relu(x), torch.relu(x))
        assert "toy.tiled failed on" in caplog.text
        assert "no 256 rows" in caplog.text


@pytest.mark.parametrize(
    ("planned", "own", "served_by"),
    [
        ({"tile": 512}, [{"tile": 32}, {"tile": 64}, {"tile": 128}], {"tile": 128}),
        ({"tile": 70}, [{"tile": 32}, {"tile": 64}, {"tile": 128}], {"tile": 64}),
        (  # a tile of as many elements, where one side is cut short
            {"BLOCK_R": 4, "BLOCK_C": 512},
            [{"BLOCK_R": n, "BLOCK_C": 64} for n in (64, 32, 1)],
            {"BLOCK_R": 32, "BLOCK_C": 64},
        ),
        ({"rank": 2}, [{"rank": i} for i in range(3)], {"rank": 0}),  # ranks are the key's own
        (
            {"tile": 64, "fetch": 2, "stream": True},
            [{"tile": 8, "fetch": 2, "stream": True}, {"tile": 64, "stream": False}],
            {"tile": 64, "stream": False},
        ),
        (
            {"way": "held", "tile": 64},
            [{"way": "swept", "tile": 64}, {"way": "held", "tile": 4096}],
            {"way": "held", "tile": 4096},
        ),
        (
            {"products": [{"tile": 64, "split": True}, {"rank": 5}]},
            [{"products": [{"tile": n, "split": n > 64}, {"rank": 0}]} for n in (32, 128)],
            {"products": [{"tile": 128, "split": True}, {"rank": 0}]},
        ),
    ],
)
def test_a_neighbour_is_followed_to_the_closest_configuration_of_this_key(
    served: Served, planned: Config, own: list[Config], served_by: Config
) -> None:
    x, other = torch.randn(64, 64), torch.randn(128, 64)
    RELU.add(
        Candidate(
            "toy.tiled",
            bind=lambda key, config, device: lambda x: (torch.relu(x),),
            trusted=True,
            sources=(len,),
            configs=lambda key: own,
        )
    )
    put(replace(plan(key_of(other), "toy.tiled"), eager_config=planned))
    with tensorlogic.policy(tune="off"):
        found = dispatch_selector.choose(RELU, key_of(x), (x,), policy.current())
    assert (found.candidate.id, found.config) == ("toy.tiled", served_by)


def test_a_configuration_of_the_same_sizes_is_taken_as_it_is_and_one_unlike_all_is_not(
    served: Served,
) -> None:
    key = key_of(torch.randn(64, 64))

    def chosen(own: list[Config], planned: Config, same: bool) -> Config:
        ranked = replace(toy("toy.ranked", []), configs=lambda key: own)
        return nearest_plans.closest(ranked, key, planned, same)

    ranks = [{"rank": i} for i in range(3)]
    assert chosen(ranks, {"rank": 2}, same=True) == {"rank": 2}
    assert chosen(ranks, {"rank": 2}, same=False) == {"rank": 0}
    assert chosen(ranks[:2], {"rank": 2}, same=True) == {"rank": 0}
    ways = [{"way": "swept", "tile": 64}, {"way": "swept", "tile": 8}]
    assert chosen(ways, {"way": "held", "tile": 8}, same=False) == ways[0]
    assert chosen([], {"way": "held"}, same=False) == {"way": "held"}
    parted = [{"tile": 128, "stages": 5}, {"tile": 128, "stages": 4, "PART": 64}]
    for part in ({}, {"PART": 32}):  # what follows from the rest makes no configuration another one
        assert chosen(parted, {"tile": 128, "stages": 4, **part}, same=False) == parted[1]


@pytest.mark.parametrize(
    ("versions", "rank", "where"),
    [
        ({}, 2, " on a GPU of the same chip"),
        ({"driver": "another"}, 2, " on a GPU of the same chip"),
        ({"torch": "2.0.0"}, 0, " under PyTorch 2.0.0"),
        ({"nvidia-cublas": "1"}, 0, " on a GPU of the same chip"),
    ],
)
def test_ranks_are_borrowed_where_the_software_is_the_same(
    versions: dict[str, str],
    rank: int,
    where: str,
    served: Served,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library's algorithms are numbered anew in each of its versions; where a plan of the very key is from, explain tells."""
    key, here = key_of(torch.randn(64, 64)), environment(CPU)
    ranks = [{"rank": i} for i in range(3)]
    RELU.add(replace(toy("toy.ranked", []), sources=(len,), configs=lambda key: ranks))
    lent = replace(plan(key, "toy.ranked"), eager_config=ranks[2])
    lent.versions = {**here.versions(), **versions}
    store = plans.PlanStore(tmp_path, here)
    monkeypatch.setattr(store, "_read", lambda: ({}, {}, {key.text: lent.to_json()}))
    monkeypatch.setattr(open_stores, "current", lambda device: store)
    found = dispatch_selector.decide(RELU, key, CPU, policy.current())
    assert found.eager == ("toy.ranked", {"rank": rank})
    assert found.source == f"neighbour {key.text}{where}"


def test_from_afar_a_gain_is_followed_and_a_loss_left_to_the_cost_models(served: Served) -> None:
    def known(rows: int, took: float) -> Plan:
        other = on_gpu(torch.randn(rows, 64))
        times = {EAGER: 10.0, "toy.a": 10.0 * took}
        found = [
            Evidence(id, {}, "measured", us, us, source=RELU.candidates[id].source)
            for id, us in times.items()
        ]
        return replace(plan(other, min(times, key=times.__getitem__)), evidence=found)

    def on_gpu(x: Tensor) -> Key:
        return replace(key_of(x), device="cuda")

    RELU.add(replace(toy("toy.model", []), guess=lambda key: 0.5, sources=(len,)))
    asked = on_gpu(torch.randn(4096, 64))
    store = open_stores.current(CPU)
    for rows, took, who in (
        (64, 0.5, "toy.a"),
        (64, 1.5, "toy.model"),
        (64, 0.99, "toy.model"),  # a gain that the distance outweighs
        (2048, 1.5, EAGER),
        (2048, 0.995, EAGER),
    ):
        store.forget(lambda _: True)
        store.put(known(rows, took))
        found = dispatch_selector.decide(RELU, asked, CPU, policy.current())
        assert found.eager[0] == who, (rows, took)
    store.put(known(64, 0.5))  # a loss nearby is heeded, whoever gains further away
    assert dispatch_selector.decide(RELU, asked, CPU, policy.current()).eager[0] == EAGER
    store.forget(lambda _: True)
    store.put(known(128, 1.5))  # from afar it is not: the next neighbour is asked
    store.put(known(64, 0.5))
    assert dispatch_selector.decide(RELU, asked, CPU, policy.current()).eager[0] == "toy.a"


def test_a_plan_of_other_tensors_or_flags_is_nobodys_neighbour(served: Served) -> None:
    key = replace(key_of(torch.randn(64, 64)), device="cuda")
    for other in (
        replace(key, flags=()),
        replace(key, flags=(*key.flags, ("more", 1))),
        replace(key, names=("x", "y"), tensors=key.tensors * 2),
        replace(key, names=(), tensors=()),
    ):
        put(plan(other, "toy.a"))
    assert dispatch_selector.decide(RELU, key, CPU, policy.current()).source == "eager"


def test_a_neighbours_configuration_serves_where_none_is_listed(served: Served) -> None:
    def listed(key: Key) -> Any:
        if key == key_of(x):
            raise CompileFailure("nothing fits")
        return [{"tile": 32}]

    x, other = torch.randn(64, 64), torch.randn(128, 64)
    RELU.add(replace(toy("toy.unlisted", []), sources=(len,), configs=listed))
    put(replace(plan(key_of(other), "toy.unlisted"), eager_config={"tile": 512}))
    with tensorlogic.policy(tune="off"):
        found = dispatch_selector.choose(RELU, key_of(x), (x,), policy.current())
    assert (found.candidate.id, found.config) == ("toy.unlisted", {"tile": 512})


def every_way(x: Tensor) -> None:
    """One call of each kind: eager, recorded, inference, unaligned, registered."""
    tensorlogic.relu(x)
    tensorlogic.relu(x.clone().requires_grad_()).sum().backward()
    with torch.inference_mode():
        tensorlogic.relu(x.clone())
    tensorlogic.relu(torch.cat([x.new_zeros(1), x.view(-1)])[1:].view_as(x))
    torch.ops.tensorlogic.relu(x, False)
    torch.ops.tensorlogic.relu(x, True)


WAYS = 6


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("mode", ["deterministic", "lockfile"])
@pytest.mark.parametrize("save", [False, True])
def test_one_candidate_serves_every_way_when_reproducible(
    served: Served, tmp_path: Path, mode: str, save: bool
) -> None:
    x = torch.randn(16, 8)
    made = plan(key_of(x, save), "toy.a", captured="toy.b")
    changes: dict[str, Any] = {"deterministic": True}
    if mode == "lockfile":
        export_lockfile(tmp_path / "lock.json", [made], [environment(CPU)])
        changes = {"lockfile": tmp_path / "lock.json"}
    else:
        put(made)
    for tune in ("auto", "full"):
        served.clear()
        with tensorlogic.policy(tune=tune, **changes):
            every_way(x)
            assert served == ["toy.a"] * WAYS
            tensorlogic.relu(torch.randn(32, 8))  # a neighbour's key: not locked
            assert served == ["toy.a"] * WAYS


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("save", [False, True])
def test_plans_that_come_meanwhile_change_no_deterministic_call(served: Served, save: bool) -> None:
    x, y = torch.randn(16, 8), torch.randn(16, 8).requires_grad_(save)
    with tensorlogic.policy(deterministic=True):
        tensorlogic.relu(y)  # nothing is planned: torch.eager
        put(plan(key_of(x), "toy.a"), plan(key_of(x, True), "toy.a"))
        every_way(x)
        assert served == []
        assert tensorlogic.explain(tensorlogic.relu, x).keys[0].eager == EAGER
        open_stores.forget()  # as a later process
        every_way(x)
        assert served == ["toy.a"] * WAYS
    tensorlogic.relu(x)
    assert served == ["toy.a"] * (WAYS + 1)


def test_deterministic_calls_take_what_tune_was_asked_for(served: Served) -> None:
    x = torch.randn(16, 8)
    with tensorlogic.policy(deterministic=True):
        tensorlogic.relu(x)
    put(plan(key_of(x), "toy.a"))
    tensorlogic.tune(tensorlogic.relu, torch.randn(4, 4))
    served.clear()
    with tensorlogic.policy(deterministic=True):
        tensorlogic.relu(x)
    assert served == ["toy.a"]


@pytest.mark.parametrize("why", ["atomics", "recorded", "refused", "unaligned"])
def test_eager_serves_every_way_where_the_candidate_cannot(served: Served, why: str) -> None:
    x = torch.randn(16, 8)
    a = RELU.candidates["toy.a"]
    changes: dict[str, Any] = {
        "atomics": {"deterministic": False},
        "recorded": {"supports": lambda key: "no save" if key.flag("save") else None},
        "unaligned": {"supports": lambda key: None if key.tensors[0].align == 16 else "aligned"},
        "refused": {},
    }[why]
    RELU.candidates["toy.a"] = replace(a, **changes)
    put(plan(key_of(x), "toy.a"))
    if why == "refused":
        forward = plan(key_of(x, True), EAGER)
        forward.evidence.append(Evidence("toy.a", {}, "refused", reason="wrong", source=a.source))
        put(forward)
    with tensorlogic.policy(deterministic=True):
        every_way(x)
    assert served == []
    tensorlogic.relu(x)
    assert served == ["toy.a"]


@pytest.mark.slow
def test_fresh_stores_choose_alike(monkeypatch: pytest.MonkeyPatch, served: Served) -> None:
    """A lead within the noise does not count: eager keeps its place, and of equals the last registered serves."""
    speed = {EAGER: 10.0, "toy.a": 9.8, "toy.b": 9.7}

    def stub(calls: Any, device: torch.device, *_: Any, **__: Any) -> timer.Samples:
        return timer.Samples({name: [speed.get(name, 50.0)] * 8 for name in calls})

    monkeypatch.setattr(timer, "device_samples", stub)
    x = torch.randn(8, 8)

    def chosen() -> list[str]:
        picks = []
        for _ in range(5):
            open_stores.current(CPU).forget()
            open_stores.forget()
            picks.append(tensorlogic.tune(tensorlogic.relu, x).plans[0].eager)
        return picks

    assert chosen() == [EAGER] * 5
    speed["toy.a"], speed["toy.b"] = 9.0, 8.9
    assert chosen() == ["toy.b"] * 5
    speed["toy.a"], speed["toy.b"] = 8.9, 9.5
    assert chosen() == ["toy.b"] * 5
    speed["toy.b"] = 9.9
    assert chosen() == ["toy.a"] * 5
    RELU.candidates["toy.b"] = replace(RELU.candidates["toy.b"], trusted=False)
    speed["toy.b"] = 8.9
    assert chosen() == ["toy.a"] * 5
    speed["toy.b"] = 5.0
    assert chosen() == ["toy.b"] * 5


def test_tune_meets_the_backward_keys_of_a_training_step() -> None:
    x, w = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    x.grad = torch.full_like(x, 7.0)
    before = torch.get_rng_state()

    def step(x: Tensor, w: Tensor) -> Tensor:
        return tensorlogic.linear(x, w, activation="gelu")

    ops = {p.key.op for p in tensorlogic.tune(step, x, w).plans}
    assert ops == {"linear", "linear_backward"}
    assert (x.grad == 7).all()
    assert torch.equal(torch.get_rng_state(), before)
    assert tensorlogic.tune(step, x, w).known == 2


def test_the_first_fixed_decision_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two threads that meet a key at once under `deterministic=True`, both are served by one decision."""
    fixed = dispatch_selector._fixed
    other = decision.Decision(("torch.eager", {}), ("torch.eager", {}), "of the other thread")
    found = list[Any]()

    def slow(op: Any, key: Any, store: Any, source: str) -> Any:
        mine = fixed(op, key, store, source)
        monkeypatch.setattr(dispatch_selector, "_fixed", lambda *_: other)
        device = torch.device("cpu")
        thread = threading.Thread(
            target=lambda: found.append(dispatch_selector._lasting(op, key, device, store))
        )
        thread.start()
        thread.join()
        found.append(mine)
        return mine

    decision.FIXED.clear()
    monkeypatch.setattr(dispatch_selector, "_fixed", slow)
    with tensorlogic.policy(deterministic=True):
        tensorlogic.add(torch.ones(5, 3), torch.ones(5, 3))
    (stays,) = decision.FIXED.values()
    assert found[0] is stays
    assert found[1] is not stays
    decision.FIXED.clear()
