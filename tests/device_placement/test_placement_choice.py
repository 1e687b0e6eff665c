"""Where `placement("auto")` runs a call: by what transfers and runs are expected to take, then by what they took. No GPU is needed:
arguments stay where they are, and a clock says what either side would have taken."""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.device_placement import link_speed, timing_history
from tensorlogic.memory import transfer

GPU = torch.device("cuda", 0)
SIDE = 128  # of a product that is worth a look: 4 million operations
placement = importlib.import_module("tensorlogic.device_placement.placement")


def forget() -> None:
    placement.forget()
    link_speed.forget()


class Machine:
    """A CPU of 1 GFLOP/s and a GPU behind a link; what calls really take there may be set to something else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.ran, self.patch = 0.0, [], monkeypatch
        self.takes = {"cpu": 4e-3, "cuda": 1e-4}
        self.speeds = {"cpu": 1e9, "cuda": 1e12}
        link = link_speed.Link(1e-5, 1e10, True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(transfer, "available", lambda kind="cuda": True)  # which remembers
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
        monkeypatch.setattr(link_speed, "link", lambda device: link)
        monkeypatch.setattr(link_speed, "speed", self.speed)
        monkeypatch.setattr(link_speed, "time_again", lambda place: None)
        monkeypatch.setattr(placement, "_moved", self.moved)
        monkeypatch.setattr(placement, "_home", lambda out: out)
        clock = SimpleNamespace(perf_counter=lambda: self.clock)
        monkeypatch.setattr(timing_history, "time", clock)

    def speed(self, place: torch.device) -> float:
        return max(self.speeds[place.type], link_speed._SPEED.get(place, 0.0))

    def moved(self, given: Any, place: torch.device) -> Any:
        if isinstance(given, Tensor) and not given.requires_grad:  # the first operand
            self.ran.append(place.type)
            self.clock += self.takes[place.type]
        return given

    def run(self, times: int, side: int = SIDE, dtype: torch.dtype = torch.float32) -> list[str]:
        """Where these calls ran; one that goes straight to its launcher is not seen to move anything."""
        a, b = torch.randn(side, side, dtype=dtype), torch.randn(side, side, dtype=dtype)
        b.requires_grad_()
        self.ran.clear()
        with torch.no_grad(), tensorlogic.placement("auto"):
            for _ in range(times):
                y = tensorlogic.matmul(a, b)
        torch.testing.assert_close(y, a @ b, rtol=1e-4, atol=1e-4)
        return list(self.ran)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    forget()
    with monkeypatch.context() as patched:
        yield Machine(patched)
    forget()


def test_small_work_never_leaves_the_cpu(machine: Machine) -> None:
    machine.speeds["cpu"] = 1.0
    assert set(machine.run(5, 64)) == {"cpu"}


def test_what_is_hopeless_is_not_tried(machine: Machine) -> None:
    assert machine.run(8) == ["cuda"] * 8
    forget()
    machine.speeds["cpu"], machine.takes["cpu"] = 1e12, 1e-5
    assert set(machine.run(8)) == {"cpu"}  # a call that stays for good comes by here no more


def test_near_sides_are_timed_and_the_faster_stays_whatever_was_expected(machine: Machine) -> None:
    machine.speeds["cpu"] = 6e10  # 70 us beside 2 * 10 + 20 of the link and 4 of the run
    machine.takes = {"cpu": 3e-5, "cuda": 1e-4}
    first = machine.run(6)
    assert first == ["cuda"] * 3 + ["cpu"] * 3
    assert set(machine.run(4)) == {"cpu"}


def test_a_side_that_disappoints_lets_the_other_try(machine: Machine) -> None:
    machine.takes = {"cpu": 1e-3, "cuda": 5e-2}  # 4 ms of the CPU were expected, 50 us of the GPU
    assert machine.run(7) == ["cuda"] * 3 + ["cpu"] * 4


@pytest.mark.parametrize(
    ("first", "runs"),
    [
        ([1e-3, 3e-5], 3),  # the first call binds, the others do not
        ([9e-4, 5e-4, 4e-4, 3e-5], 5),  # several do, and each might be the last
        ([2e-2, 2e-2, 2e-2], 3),  # somebody has the cores: that has cost enough
        ([1e-3] * 8 + [3e-5], 10),  # and here it has not
        ([1e-3] * 20, 12),  # but who takes so long again and again is believed
    ],
)
def test_a_side_is_timed_until_its_times_tell_what_it_takes(
    machine: Machine, first: list[float], runs: int
) -> None:
    """30 us of the CPU, once nothing is done for the first time and nobody is in its way, beside 100 of the GPU."""
    machine.speeds["cpu"] = 6e10
    machine.takes = {"cpu": 3e-5, "cuda": 1e-4}
    left = iter(first)

    def moved(given: Any, place: torch.device) -> Any:
        if place.type == "cpu" and isinstance(given, Tensor) and not given.requires_grad:
            machine.takes["cpu"] = next(left, 3e-5)
        return Machine.moved(machine, given, place)

    machine.patch.setattr(placement, "_moved", moved)
    seen = machine.run(3 + runs + 2)
    assert seen[: 3 + runs] == ["cuda"] * 3 + ["cpu"] * runs
    assert set(seen[3 + runs :]) == {"cpu" if min(first) < 1e-4 else "cuda"}


def test_what_was_disturbed_is_timed_again_and_mended(machine: Machine) -> None:
    """Another program had the cores while the CPU was timed: twice the GPU's time, where it would take a tenth."""
    machine.speeds["cpu"] = 6e10
    machine.takes = {"cpu": 2**-12, "cuda": 2**-13}  # whose sums are exact
    assert machine.run(6) == ["cuda"] * 3 + ["cpu"] * 3
    machine.takes["cpu"] = 1e-5
    rest = round(
        timing_history.AGAIN * 2 / timing_history.SHARE
    )  # 3 calls of twice the time are 5 % of these
    assert machine.run(rest) == ["cuda"] * rest
    assert machine.run(6) == ["cuda"] * 3 + ["cpu"] * 3
    assert set(machine.run(10)) == {"cpu"}


def test_a_cpu_that_took_strangely_long_has_another_chance_soon(machine: Machine) -> None:
    """Somebody's process has one of its cores for a while: every product waits for it. One run each time tells whether it still does."""
    machine.speeds["cpu"] = 6e10
    machine.takes = {"cpu": 8e-3, "cuda": 1e-4}
    seen = machine.run(100)
    assert seen[:10] == ["cuda"] * 3 + ["cpu"] * 7
    again = [i for i, side in enumerate(seen) if side == "cpu"][7:]
    assert len(again) == 4
    assert [b - a for a, b in itertools.pairwise(again)] == [
        10,
        16,
        28,
    ]  # 3 and a few runs, 6, 12, 24
    machine.takes["cpu"] = 3e-5
    assert machine.run(60)[-1] == "cpu"


def test_a_gpu_that_takes_longer_than_the_cpu_did_is_timed_again(machine: Machine) -> None:
    """Transfers beside threads that spin take several times as long as those that were timed."""
    machine.speeds["cpu"] = 6e10
    machine.takes = {"cpu": 2e-4, "cuda": 1e-4}
    machine.run(10)
    machine.takes["cuda"] = 4e-4
    assert machine.run(7) == ["cuda"] * 7
    machine.takes["cuda"] = 1e-4
    assert machine.run(20) == ["cuda"] * 20  # it was for a moment
    machine.takes["cuda"] = 4e-4
    seen = machine.run(20)
    assert seen == ["cuda"] * 11 + ["cpu"] * len(seen[11:])


def test_calls_that_stay_are_counted_until_both_are_timed_again(machine: Machine) -> None:
    machine.speeds["cpu"] = 6e10
    machine.takes = {"cpu": 2**-14, "cuda": 2**-13}
    machine.run(6)
    rest = round(timing_history.AGAIN * 2 / timing_history.SHARE)
    seen = machine.run(rest)
    assert set(seen) == {"cpu"}
    assert len(seen) < 3  # the others did not come by
    assert machine.run(6) == ["cuda"] * 3 + ["cpu"] * 3
    (trial,) = placement._TRIALS.values()
    machine.run(3)
    assert trial.rest == 2 * rest  # ever less often
    machine.takes["cuda"] = 1e-6
    machine.run(2 * rest - 3)
    assert machine.run(8) == ["cuda"] * 3 + ["cpu"] * 3 + ["cuda"] * 2


def test_a_cpu_that_never_ran_is_tried_once_its_speed_is_known_better(machine: Machine) -> None:
    """Somebody had its cores when its speed was timed: it is timed again, and a product runs there if that makes it likely."""
    asked: list[torch.device] = []
    machine.patch.setattr(link_speed, "time_again", asked.append)
    machine.speeds["cpu"], machine.takes["cuda"] = 3e10, 2**-15
    machine.takes["cpu"] = 2**-16
    assert machine.run(200) == ["cuda"] * 200
    (trial,) = placement._TRIALS.values()
    assert trial.rest == pytest.approx(
        timing_history.AGAIN * (2 * SIDE**3 / 3e10) / 2**-15 / timing_history.SHARE
    )
    assert machine.run(200) == ["cuda"] * 200  # as hopeless as before
    assert asked == [torch.device("cpu")]
    machine.speeds["cpu"] = 6e10
    seen = machine.run(800)
    assert len(asked) == 2
    assert seen.count("cpu") < 6 < len(seen)  # the rest went straight there
    assert seen[-1] == "cpu"


def test_what_a_cpu_has_done_tells_what_it_can_do(machine: Machine) -> None:
    """A product of 128 showed ten times the speed that was timed: one of 256, hopeless by the latter, is tried."""
    machine.speeds["cpu"] = 4e10
    machine.takes = {"cpu": 2 * SIDE**3 / 4e11, "cuda": 1e-4}
    machine.run(7)
    machine.takes["cpu"] *= 8
    assert machine.run(7, 2 * SIDE) == ["cpu"] * 3 + ["cuda"] * 3 + ["cpu"]


def test_sums_count_the_columns_of_each_kind_of_product() -> None:
    q, k, w = torch.empty(2, 3, 5, 7), torch.empty(2, 3, 11, 7), torch.empty(13, 7)
    ops = tensorlogic.core.op.OPS
    for name, other, columns in (
        ("attention_scores", k, 11), ("linear", w, 13), ("matmul", w.t(), 13), ("matmul", w[0], 1),
        ("add_relu", q, None),
    ):  # fmt: skip
        work = 2 * q.numel() if columns is None else 2 * q.numel() * columns
        out = q.numel() if columns is None else q[..., 0].numel() * columns
        assert placement._work(ops[name], [q, other]) == work
        assert placement._out_bytes(ops[name], [q, other]) == 4 * out


def test_a_gpu_that_never_ran_is_not_tried_later(machine: Machine) -> None:
    """What it takes to begin there may be seconds."""
    machine.speeds["cpu"], machine.takes["cpu"] = 1e12, 1e-5
    machine.run(5)
    (trial,) = placement._TRIALS.values()
    assert trial.left == math.inf


def test_a_speed_is_the_best_of_all_times_and_ever_less_often_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cpu, clock, step, size = torch.device("cpu"), [0.0], [1.0], 2 * 8**3

    def ticks() -> float:
        clock[0] += step[0]
        return clock[0]

    forget()
    monkeypatch.setitem(link_speed.SIDES, "cpu", 8)
    monkeypatch.setattr(link_speed, "time", SimpleNamespace(perf_counter=ticks))
    try:
        assert link_speed.speed(cpu) == size
        begin, (again, _) = clock[0], link_speed._NEXT[cpu]
        assert again == begin + 13 / link_speed.SHARE  # it has looked at its clock 14 times
        link_speed.time_again(cpu)  # too early
        assert link_speed._NEXT[cpu][0] == again
        clock[0], step[0] = again, 4.0
        assert link_speed.speed(cpu) == size
        begin, (later, _) = clock[0], link_speed._NEXT[cpu]
        assert later == begin + 2 * 4 * 13 / link_speed.SHARE
        clock[0], step[0] = later, 0.5
        assert link_speed.speed(cpu) == 2 * size
    finally:
        forget()


def test_dtypes_of_one_shape_go_where_each_is_fast(machine: Machine) -> None:
    """What a float32 product was found to gain by staying says nothing of float64's."""
    machine.speeds["cpu"] = 6e10
    machine.takes = {"cpu": 2e-4, "cuda": 1e-4}
    machine.run(
        7, dtype=torch.float64
    )  # three on the CPU among them; served on the GPU from now on
    machine.takes = {"cpu": 5e-5, "cuda": 1e-4}
    machine.run(12)
    assert machine.run(8, dtype=torch.float64) == ["cuda"] * 8


def test_a_gpu_that_fails_is_not_asked_again(machine: Machine) -> None:
    moved = machine.moved

    def full(given: Any, place: torch.device) -> Any:
        if place.type == "cuda":
            machine.ran.append("cuda")
            raise torch.OutOfMemoryError("none left")
        return moved(given, place)

    machine.patch.setattr(placement, "_moved", full)
    machine.speeds["cpu"] = 6e10
    assert machine.run(8).count("cuda") == 3
    assert "cuda" not in machine.run(8)


def test_reproducible_calls_stay_where_they_were(machine: Machine) -> None:
    """Whatever other calls find out meanwhile, who have no part in what these chose."""
    machine.speeds["cpu"] = 6e10
    machine.takes = {"cpu": 2e-4, "cuda": 1e-4}
    with tensorlogic.policy(deterministic=True):
        machine.run(7)
    machine.run(7)
    machine.takes["cpu"] = 1e-5
    assert "cpu" in machine.run(200)
    with tensorlogic.policy(deterministic=True):
        assert machine.run(400) == ["cuda"] * 400


def test_explain_shows_the_sum(machine: Machine) -> None:
    a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
    with torch.no_grad(), tensorlogic.placement("auto"):
        said = str(tensorlogic.explain(tensorlogic.matmul, a, b))
    bytes_in, bytes_out = 2 * 4 * SIDE**2, 4 * SIDE**2
    cpu, run = (round(2 * SIDE**3 / machine.speeds[s] * 1e6) for s in ("cpu", "cuda"))
    there, back = (round(10 + n / 1e4) for n in (bytes_in, bytes_out))
    assert f"matmul: CPU {cpu} us; cuda:0 in {there} + run {run} + out {back} us -> cuda" in said


def test_a_chain_pays_for_its_operands_once(machine: Machine) -> None:
    x, w = torch.randn(SIDE, SIDE), torch.nn.Parameter(torch.randn(SIDE, SIDE))
    y = tensorlogic.unified(x)
    assert placement._bytes_to_move(y, GPU) == placement._bytes_to_move(x, GPU) == x.nbytes
    y._copies[GPU] = (x.clone(), 0)
    assert placement._bytes_to_move(y, GPU) == 0
    x.add_(1)  # the device's copy is stale
    assert placement._bytes_to_move(y, GPU) == x.nbytes
    assert placement._bytes_to_move(w, GPU) == w.nbytes
    placement.weight_cache.CACHE.get(w, f"on {GPU}", lambda t: t.clone(), lambda t: t.nbytes)
    assert placement._bytes_to_move(w, GPU) == 0
    with torch.no_grad():
        w.add_(1)
    assert placement._bytes_to_move(w, GPU) == w.nbytes
