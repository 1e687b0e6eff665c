"""Measuring between the calls of a key: within its share of time, once, unseen by the caller."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.autotune import background_tuning, tuner
from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.core.op import OPS
from tensorlogic.measure import isolation, timer, verification
from tensorlogic.plans import open_stores, store
from tensorlogic.system import capture_state, compile_pool

from ..support.clockwork import Clock, Work

CPU = torch.device("cpu")
RELU = OPS["relu"]


class Planned:
    """A study of known cost: (seconds announced, seconds taken) for each step."""

    script: tuple[tuple[float, float], ...] = ()
    made = 0

    def __init__(self, *_: Any, **__: Any) -> None:
        Planned.made += 1
        self.plan = None
        self.pending: list[Any] = []

    def steps(self) -> Iterator[float]:
        for announced, taken in Planned.script:
            CLOCK.now += taken
            Planned.spent += taken
            Planned.log.append((CLOCK.now, Planned.spent))
            yield announced

    spent = 0.0
    log: list[tuple[float, float]]


CLOCK = Clock()


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> type[Planned]:
    monkeypatch.setattr(background_tuning, "time", CLOCK)
    monkeypatch.setattr(background_tuning, "KeyTuner", Planned)
    monkeypatch.setattr(background_tuning, "_DOUBT", {"cpu": 1.0})
    CLOCK.now, Planned.made, Planned.spent, Planned.log = 0.0, 0, 0.0, []
    return Planned


def wrapped(key: Key, launch: Any) -> Any:
    watch = background_tuning.watch(RELU, key, CPU)
    assert watch is not None
    return watch.wrap(launch)


@pytest.mark.parametrize("call_s", [1e-5, 1e-3, 0.2])
def test_no_step_starts_before_the_key_has_earned_it(planned: type[Planned], call_s: float) -> None:
    """Work stays under 5 % of the time spent in the key before it, where steps take what they announce."""
    first = max(background_tuning.FIRST_STEP_S, 30 * call_s)
    planned.script = ((0.5, first), (0.1, 0.5), (2.0, 0.1), (0.0, 2.0))
    in_key = 0.0

    def launch(x: Tensor) -> tuple[Tensor]:
        nonlocal in_key
        CLOCK.now += call_s
        in_key += call_s
        return (x,)

    key = RELU.key((torch.ones(3), False), "inference")
    run = wrapped(key, launch)
    x = torch.ones(3)
    seen = 0
    for _ in range(int(250 / call_s) if call_s > 1e-4 else 400_000):
        run(x)
        if len(planned.log) > seen:
            seen = len(planned.log)
            assert planned.spent <= background_tuning.SHARE * in_key * (1 + 1e-9)
    assert seen == (4 if call_s > 1e-4 else 1)
    assert planned.made == 1


def test_steps_that_take_longer_than_announced_are_expected_to(planned: type[Planned]) -> None:
    planned.script = ((0.01, 0.02), *[(0.01, 0.08)] * 5, (0.0, 0.08))
    in_key = 0.0

    def launch(x: Tensor) -> tuple[Tensor]:
        nonlocal in_key
        CLOCK.now += 1e-3
        in_key += 1e-3
        return (x,)

    run = wrapped(RELU.key((torch.ones(5), False), "inference"), launch)
    shares: list[float] = []
    for _ in range(20_000):
        run(torch.ones(5))
        if len(planned.log) > len(shares):
            shares.append(planned.spent / in_key)
    assert len(shares) == 7
    assert shares[1] > background_tuning.SHARE  # the first lie is believed
    assert max(shares[2:]) <= background_tuning.SHARE * 1.001


def test_nothing_happens_before_a_few_calls(planned: type[Planned]) -> None:
    key = RELU.key((torch.ones(4), False), "inference")
    run = wrapped(key, lambda x: (x,))
    for _ in range(7):
        run(torch.ones(4))
    assert planned.made == 0


def measured_now(x: Tensor, calls: int = 4000) -> Any:
    key = RELU.key((x, False), "inference")
    for _ in range(calls):
        tensorlogic.relu(x)
        plan = open_stores.current(CPU).get(key)
        if plan is not None:
            return plan
    return None


@pytest.fixture
def generous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key has earned every step."""
    monkeypatch.setattr(background_tuning, "SHARE", 1e9)


@pytest.mark.usefixtures("generous")
def test_a_key_is_measured_once_and_then_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    puts: list[str] = []
    keep = store.PlanStore.put
    monkeypatch.setattr(
        store.PlanStore, "put", lambda self, p: (puts.append(p.key.text), keep(self, p))[1]
    )
    x = torch.randn(64)
    before = torch.get_rng_state()
    with tensorlogic.policy(tune="auto"):
        plan = measured_now(x)
        assert plan is not None
        for _ in range(1000):
            tensorlogic.relu(x)
    assert puts == [plan.key.text]
    assert torch.equal(torch.get_rng_state(), before)
    (bucket,) = policy.interned(_auto()).entries.values()
    assert len(bucket) == 1


def _auto() -> policy.Policy:
    with tensorlogic.policy(tune="auto") as chosen:
        return chosen


@pytest.mark.usefixtures("generous")
def test_a_training_step_is_measured_as_well() -> None:
    x = torch.randn(64, requires_grad=True)
    key = RELU.key((x, True), "forward")
    with tensorlogic.policy(tune="auto"):
        for _ in range(4000):
            tensorlogic.relu(x)
            if open_stores.current(CPU).get(key) is not None:
                return
    raise AssertionError("the recorded key was never measured")


def test_numbers_that_another_thread_draws_are_not_drawn_again() -> None:
    with ThreadPoolExecutor(1) as pool, isolation.preserved(CPU, OPS["dropout_linear"]):
        drawn = pool.submit(torch.rand, 8).result()
    assert not torch.equal(torch.rand(8), drawn)


@pytest.mark.usefixtures("generous")
def test_steps_may_fall_into_different_modes() -> None:
    """A study that begins under inference mode may go on outside it, and under autocast or no_grad."""
    with torch.inference_mode(), isolation.preserved(CPU):
        assert not torch.ones(1).is_inference()
    x = torch.randn(48)
    key = OPS["add_relu"].key((x, x + 0, False), "inference")
    y = x + 0
    with tensorlogic.policy(tune="auto"):
        for i in range(6000):
            with torch.inference_mode(i % 3 == 0), torch.set_grad_enabled(i % 2 == 0):
                tensorlogic.add_relu(x, y)
            if open_stores.current(CPU).get(key) is not None:
                break
    plan = open_stores.current(CPU).get(key)
    assert plan is not None
    assert not [e.reason for e in plan.evidence if e.reason.startswith("failed")]


@pytest.mark.usefixtures("generous")
@pytest.mark.parametrize("mode", ["capture", "deterministic", "torch", "off", "forced"])
def test_nothing_is_measured_where_it_may_not_be(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(background_tuning, "KeyTuner", lambda *a, **k: made.append(a))
    changes = {
        "capture": {},
        "deterministic": {"deterministic": True},
        "torch": {},
        "off": {"tune": "off"},
        "forced": {"force": EAGER},
    }[mode]
    with tensorlogic.policy(**{"tune": "auto", **changes}):  # type: ignore[arg-type]
        if mode == "capture":
            monkeypatch.setattr(capture_state, "_open", {1})
        if mode == "torch":
            monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        for _ in range(300):
            tensorlogic.relu(torch.ones(12))
    assert made == []


@pytest.mark.usefixtures("generous")
def test_trouble_in_a_study_is_logged_and_never_the_callers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: tuner.KeyTuner) -> Iterator[float]:
        yield 0.0
        raise OSError("disk on fire")

    monkeypatch.setattr(tuner.KeyTuner, "steps", broken)
    with tensorlogic.policy(tune="auto"):
        for _ in range(1000):
            assert tensorlogic.relu(torch.ones(7)).sum() == 7
    assert "disk on fire" in caplog.text
    assert caplog.text.count("cannot be measured") == 1


@pytest.mark.usefixtures("generous")
def test_it_waits_for_the_compile_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []

    class Pending(Planned):
        def steps(self) -> Iterator[float]:
            steps.append(1)
            yield 0.0

    monkeypatch.setattr(background_tuning, "KeyTuner", Pending)
    monkeypatch.setattr(compile_pool, "ready", lambda jobs: False)
    with tensorlogic.policy(tune="auto"):
        for _ in range(1000):
            tensorlogic.relu(torch.ones(9))
        assert steps == []
        monkeypatch.setattr(compile_pool, "ready", lambda jobs: True)
        for _ in range(300):
            tensorlogic.relu(torch.ones(9))
    assert steps == [1]


@pytest.mark.slow
def test_real_calls_pay_for_no_more_than_their_share(
    one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of candidates within reach of each other: one call of a kernel in an interpreter takes longer than all steps. By the work of
    one thread."""
    compiled = {id: c for id, c in RELU.candidates.items() if not id.startswith("triton.")}
    monkeypatch.setattr(RELU, "candidates", compiled)
    x = torch.randn(1 << 18)
    key: Key = RELU.key((x, False), "inference")
    (clock := Work()).stands_in(monkeypatch, background_tuning, timer, tuner, verification)
    begin = clock.perf_counter()
    with tensorlogic.policy(tune="auto"):
        while clock.perf_counter() - begin < 1.5:
            tensorlogic.relu(x)
    watch = background_tuning._WATCHES[("cpu", key.text)]
    assert watch.used_s <= background_tuning.SHARE * 1.5 + 0.2, (
        "one step may take longer than announced"
    )


@pytest.mark.usefixtures("generous")
def test_many_threads_call_while_a_key_is_measured() -> None:
    x = torch.randn(96)
    want = torch.relu(x)
    problems: list[str] = []

    def work() -> None:
        with tensorlogic.policy(tune="auto"):
            for _ in range(600):
                if not torch.equal(tensorlogic.relu(x), want):
                    problems.append("wrong")

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert problems == []
    assert len([k for k in background_tuning._WATCHES if "f32[96]" in k[1]]) == 1
