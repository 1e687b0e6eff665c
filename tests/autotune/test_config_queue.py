"""Kernels that are not compiled in time stay out of a plan, which says so, and are measured the next time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.autotune import config_queue, measure_key, tune, tuner
from tensorlogic.core.candidate import EAGER, Candidate
from tensorlogic.core.key import Key
from tensorlogic.core.op import Op
from tensorlogic.plans import open_stores
from tensorlogic.plans.environment import environment
from tensorlogic.plans.plan import UNFINISHED, Plan
from tensorlogic.system import compile_pool

from ..support.clockwork import Clock
from ..support.plans import (
    begun,
    finish,
)
from ..support.plans import job as job  # a fixture
from ..support.plans import kept as kept  # a fixture
from ..support.plans import nursed as nursed  # a fixture
from ..support.plans import source as source  # a fixture

pytestmark = pytest.mark.usefixtures("nursed")
CPU = torch.device("cpu")
PROMPT_S = 0.4


def plus(x: Tensor) -> Tensor:
    return x + 1


def planted(*kernels: tuple[str, list[Any]]) -> tuple[Op, Key]:
    """x + 1 by candidates of these names, with a configuration for each of their jobs."""
    op = Op(plus, flops=lambda key: 1.0, traffic=lambda key: 1.0, listed=False)
    op.add(Candidate(EAGER, bind=lambda key, config, device: lambda x: (time.sleep(1e-3), (x + 1,))[1]))  # fmt: skip
    for name, jobs in kernels:
        op.add(
            Candidate(
                name,
                bind=lambda key, config, device: lambda x: (x + 1,),
                configs=lambda key, jobs=jobs: [{"n": n} for n in range(len(jobs))],  # type: ignore[misc]
                jobs=lambda key, config, device, jobs=jobs: (jobs[config["n"]],),  # type: ignore[misc]
            )
        )
    return op, op.key((torch.zeros(8),), "inference")


def look(op: Op, key: Key, known: Plan | None = None, prompt_s: float = PROMPT_S) -> Plan:
    plan = tuner.KeyTuner(
        op, key, CPU, environment(CPU), known, budget_s=0.01, prompt_s=prompt_s
    ).run()
    assert plan is not None
    return plan


def slow_and_quick(job: Any) -> tuple[Any, Any]:
    """A job that runs until a file beside its own says `.go`, and one that is finished."""
    slow, quick = job("wait", "slow"), job("fine", "quick")
    compile_pool.submit((quick,))
    finish(quick)
    compile_pool.submit((slow,))
    begun(slow)
    return slow, quick


def reasons(plan: Plan) -> dict[str, str]:
    return {e.candidate: e.reason for e in plan.evidence}


@pytest.mark.slow
def test_what_is_not_compiled_in_time_is_left_for_the_next_time(job: Any) -> None:
    slow, quick = slow_and_quick(job)
    op, key = planted(("planted.quick", [quick]), ("planted.slow", [slow]))
    begin = time.perf_counter()
    plan = look(op, key)
    assert PROMPT_S < time.perf_counter() - begin < PROMPT_S + 20
    assert plan.eager == "planted.quick"
    assert reasons(plan)["planted.slow"] == f"not measured{UNFINISHED}"
    assert not reasons(plan)["planted.quick"].endswith(UNFINISHED)
    assert plan.incomplete
    learned = tune.Learned([plan])
    assert learned.unfinished == [key.text]
    assert str(learned).endswith("; kernels of 1 were still being compiled")
    assert not measure_key.complete(op, plan, key)
    Path(slow.path + ".go").touch()
    finish(slow)
    plan = look(op, key, plan)
    assert not plan.incomplete
    assert measure_key.complete(op, plan, key)
    assert {e.status for e in plan.evidence} == {"measured"}


@pytest.mark.slow
def test_what_was_late_is_measured_again_in_the_time_that_others_left(job: Any) -> None:
    slow, quick = slow_and_quick(job)
    op, key = planted(("planted.quick", [quick]), ("planted.slow", [slow]))
    plan = look(op, key)
    learned, now = tune.Learned([plan]), time.perf_counter()
    Path(slow.path + ".go").touch()
    finish(slow)
    used_up = now - tune.KEY_S + tuner.PROMPT_S / 4
    tune._once_more([(op, key, CPU)], learned, used_up)
    assert learned.plans == [plan]
    tune._once_more([(op, key, CPU)], learned, now)
    assert learned.unfinished == []
    assert set(reasons(learned.plans[0])) == {EAGER, "planted.quick", "planted.slow"}
    assert measure_key.complete(op, open_stores.current(CPU).get(key), key)


def test_a_configuration_too_few_is_said_as_well(job: Any) -> None:
    slow, quick = slow_and_quick(job)
    op, key = planted(("planted.both", [slow, quick]))
    plan = look(op, key)
    assert plan.eager == "planted.both"
    assert plan.eager_config == {"n": 1}
    assert reasons(plan)["planted.both"] == f"chosen{UNFINISHED}"
    Path(slow.path + ".go").touch()


@pytest.mark.slow
def test_without_a_limit_everything_is_waited_for(job: Any) -> None:
    late = job("sleep")
    compile_pool.submit((late,))
    begun(late)
    op, key = planted(("planted.late", [late]))
    plan = look(op, key, prompt_s=float("inf"))
    assert Path(late.path).exists()
    assert plan.eager == "planted.late"
    assert not plan.incomplete


def test_the_caller_begins_nothing_in_the_second_half_of_its_time(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = job("wait", "busy")
    compile_pool.submit((busy,))
    begun(busy)  # the only worker
    op, key = planted(("planted.many", [job("fine", f"{n}") for n in range(20)]))
    late = config_queue.listed(op.candidates["planted.many"], key, CPU)
    compile_pool.submit(config_queue.jobs([late]))
    (clock := Clock(tick=0.01)).stands_in(monkeypatch, config_queue)
    monkeypatch.setattr(config_queue, "LOOK_S", 1e-3)
    came = []
    for turn in config_queue.as_compiled(late, 2):
        compile_pool.settle(turn.jobs[0])  # nobody has begun it: the caller compiles
        came.append(clock.now)
        clock.sleep(0.4)
    assert clock.now >= 2
    assert came == pytest.approx([0, 0.4, 0.8], abs=0.1)
    assert len(late) == 20 - len(came)
    assert all(compile_pool.there(turn.jobs) is False for turn in late)
    Path(busy.path + ".go").touch()


def test_best_guesses_are_compiled_first() -> None:
    op, key = planted(("planted.a", ["a0", "a1"]), ("planted.b", ["b0", "b1", "b2"]))
    assert config_queue.kernels(op, key, CPU) == ["a0", "b0", "a1", "b1", "b2"]


def test_what_won_nearby_comes_before_all_best_guesses() -> None:
    op, key = planted(("planted.a", ["a0", "a1"]), ("planted.b", ["b0", "b1", "b2"]))
    lists = [config_queue.listed(op.candidates[id], key, CPU) for id in ("planted.a", "planted.b")]
    near = Plan(key, "planted.b", {"n": 2}, "planted.a", {"n": 7})
    found = config_queue.likely(lists, near)
    assert config_queue.jobs(found) == ["a0", "b2", "a1", "b0", "b1"]
    assert [turn.rank for own in found for turn in own] == [-1, 1, -1, 0, 1]
    assert config_queue.kernels(op, key, CPU, near) == config_queue.jobs(found)


def test_what_a_process_needs_to_load_kernels_is_begun_with_the_first_jobs(
    job: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENSORLOGIC_COMPILE_WORKERS", "0")
    begun: list[str] = []

    class Job:
        def run(self) -> None:
            pass

        @staticmethod
        def ahead() -> None:
            begun.append("ahead")

    compile_pool.submit([])
    assert not begun
    compile_pool.submit([Job()])
    assert begun == ["ahead"]
