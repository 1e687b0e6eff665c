"""Cost models of CPU products where nobody fitted them: PyTorch's rate and ours are timed once a machine, and choices follow."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.logging_tensor import LoggingTensorMode

from tensorlogic.core import policy
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.kernels.cpu import calibration, cost_model
from tensorlogic.measure import timer
from tensorlogic.native import cpu_library
from tensorlogic.plans import open_stores

from ...support.clockwork import Work
from ...support.native import forced

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)
CPU = torch.device("cpu")
Slower = dict[str, float]  # by operator's name: how many times longer than was expected


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Slower], list[str]]]:
    """clock(slower): each product takes what its cost model says, times that; returns the names of what was timed."""
    candidate_loading.ready("cpu")
    timed: list[str] = []

    def run(slower: Slower) -> list[str]:
        def measured(dtype: torch.dtype, products: Any) -> list[float] | None:
            return usual(dtype, [noted(dtype, p) for p in products])

        def noted(dtype: torch.dtype, p: calibration.Product) -> calibration.Product:
            name = "torch" if p.run is cost_model.torch_into else "ours"

            def called(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
                assert out.data_ptr() == p.run(a, b, out).data_ptr() or name == "ours"
                timed.append(f"{name} {dtype}")
                call, work = p.parts(len(a))
                calls.append(call + slower.get(name, 1.0) * work)
                return a

            return calibration.Product(called, p.parts)

        def once(call: Callable[[], Any], device: torch.device) -> float:
            call()
            return calls.pop()

        calls: list[float] = []
        usual = calibration._measured
        monkeypatch.setattr(calibration, "_measured", measured)
        monkeypatch.setattr(timer, "once", once)
        monkeypatch.setattr(calibration, "_preempted", lambda: 0)  # whatever runs beside the tests
        return timed

    levels = forced("avx512" if "avx512" in cost_model.features() else "portable")
    next(levels)
    yield run
    next(levels, None)


def chosen(dtype: torch.dtype, side: int = 1024) -> str:
    """What serves a matmul of an op that nobody has measured."""
    op, a = OPS["matmul"], torch.zeros(side, side, dtype=dtype)
    key = op.key((a, a, "none", False), "inference")
    return dispatch_selector.decide(op, key, CPU, policy.current()).eager[0]


@pytest.mark.parametrize(
    ("slower", "expected"),
    [
        ({"torch": 2.0}, "cpu.epilogue"),
        ({"torch": 2.0, "ours": 3.0}, EAGER),
        ({"ours": 2.0}, EAGER),
    ],
)
def test_the_choice_follows_what_was_timed(clock: Any, slower: Slower, expected: str) -> None:
    clock(slower)
    assert chosen(torch.float32) == expected


def test_bfloat16_that_pytorch_emulates_is_left_to_ours(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cost_model, "half_is_slow", lambda dtype: False)
    timed = clock({"torch": 3000.0})
    assert chosen(torch.bfloat16) == "cpu.epilogue"
    assert (
        timed.count("torch torch.bfloat16") <= calibration.ROUNDS[0]
    )  # so slow that one size says it


def test_machines_like_those_fitted_and_small_products_change_nothing(clock: Any) -> None:
    timed = clock({"torch": 1.2, "ours": 1.0})
    before = cost_model.torch_us(8, 8, 8, "f32", False)
    assert not timed
    assert cost_model.torch_factor("f32") == cost_model.native_factor(False) == 1.0
    assert timed
    assert cost_model.torch_us(8, 8, 8, "f32", False) == before


def test_rounding_alone_decides_nothing(clock: Any) -> None:
    clock({"torch": 1.4, "ours": 1.25})  # one side of what counts as close, and the other
    assert cost_model.torch_factor("f32") == cost_model.native_factor(False)


def test_what_was_timed_is_kept_in_the_process_and_on_disk(clock: Any) -> None:
    timed = clock({"torch": 2.1})
    assert cost_model.torch_factor("f32") == 2.0  # rounded to a quarter of a power of two
    count = len(timed)
    assert cost_model.torch_factor("f32") == 2.0
    open_stores.forget()
    assert cost_model.torch_factor("f32") == 2.0
    assert len(timed) == count
    file = open_stores.current(CPU).path.with_suffix(".rates")
    name = file.read_text().partition(" = ")[0]
    for edited in ("x", "0", "2", "1e9 1", "-1 1", "861 430.5"):  # not as it was written
        file.write_text(f"{name} = {edited}\n")
        open_stores.forget()
        assert cost_model.torch_factor("f32") == 1.0


def test_a_busy_machine_is_not_believed(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = clock({"torch": 2.0})
    usual, noise = timer.once, itertools.count(1)
    monkeypatch.setattr(timer, "once", lambda *a: usual(*a) * 1.2 ** next(noise))
    for _ in range(calibration.TRIES):
        assert cost_model.torch_factor("f32") == 1.0
    assert not open_stores.current(CPU).path.with_suffix(".rates").exists()
    count = len(timed)
    assert cost_model.torch_factor("f32") == 1.0
    assert len(timed) == count  # tried often enough
    monkeypatch.setattr(timer, "once", usual)
    open_stores.forget()
    assert cost_model.torch_factor("f32") == 2.0


def test_calls_that_lost_their_core_are_not_believed(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each as long as the other: a time slice of the system, met at every call."""
    clock({"torch": 2.0})
    usual, count = timer.once, itertools.count(1)
    lost = [0]

    def beside_another(call: Callable[[], Any], device: torch.device) -> float:
        lost[0] += 1
        return 8000.0 + 0 * usual(call, device)

    def now_and_then(call: Callable[[], Any], device: torch.device) -> float:
        return beside_another(call, device) if next(count) % 3 == 0 else usual(call, device)

    monkeypatch.setattr(calibration, "_preempted", lambda: lost[0])
    for once, expected in ((beside_another, 1.0), (now_and_then, 2.0)):
        monkeypatch.setattr(timer, "once", once)
        assert cost_model.torch_factor("f32") == expected


@pytest.mark.slow
def test_a_thread_that_loses_its_core_is_noticed() -> None:
    """Two processes on one core: the one that counts is interrupted."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("the system pins no process")
    code = """
import os, subprocess, sys, time
from tensorlogic.kernels.cpu import calibration as cpu_rates
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
other = subprocess.Popen([sys.executable, "-c", "import time; end = time.time() + 90\\nwhile time.time() < end: pass"])
try:
    begin, before = time.monotonic(), cpu_rates._preempted()
    while cpu_rates._preempted() < before + 5 and time.monotonic() < begin + 60: pass
    sys.exit(cpu_rates._preempted() < before + 5)
finally:
    other.kill()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_rates_that_no_processor_has_are_not_kept(clock: Any) -> None:
    clock({"torch": 900.0, "ours": 450.0})
    assert cost_model.torch_factor("f32") == cost_model.native_factor(False) == 1.0
    assert not open_stores.current(CPU).path.with_suffix(".rates").exists()


def test_nothing_is_timed_under_a_mode(clock: Any) -> None:
    timed = clock({"torch": 2.0})
    with LoggingTensorMode():
        assert cost_model.torch_factor("f32") == 1.0
    assert not timed
    assert cost_model.torch_factor("f32") == 2.0


def test_products_are_timed_as_they_are(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine, whatever it is: a factor within what any processor could have. By the work of one thread."""
    monkeypatch.setattr(calibration, "_preempted", lambda: 0)
    Work().stands_in(monkeypatch, timer)
    next(levels := forced("portable"))
    slow, until = 1.0, time.monotonic() + 20.0
    while slow == 1.0 and time.monotonic() < until:  # where others took the caches, say
        calibration._TRIED.clear()
        slow = cost_model.native_factor(False)
    next(levels, None)
    assert 1.0 < slow < 300  # four lanes or one, on a line of sixteen
