"""When Inductor may begin in the background, and what a call gives for it: soon on machines with room, one model at a time."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.compiler.inductor import background_compile, comparison
from tensorlogic.system import compile_workers, idle_resources, settings
from tests.support.inductor_fakes import DEVICE, Fake

from ...support.graphs import Layers
from ...support.inductor_fakes import Chain, same, x

GIB = 1 << 30


@pytest.fixture
def background(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Begins after ten calls of 7 us (as the fake says) where there is room, after a hundred elsewhere; comparing is free."""
    monkeypatch.setattr(background_compile, "SOON_S", 70e-6)
    monkeypatch.setattr(background_compile, "EARNED_S", 700e-6)
    monkeypatch.setattr(background_compile, "LOOK_S", 7e-6)
    monkeypatch.setattr(background_compile, "SHARE", 1e9)
    monkeypatch.setattr(background_compile, "_imported", lambda: None)
    monkeypatch.setattr(background_compile, "_BEGUN", weakref.WeakSet())
    with tensorlogic.policy(tune="auto"):
        yield


def optimized(given: torch.Tensor) -> Any:
    fast: Any = tensorlogic.optimize(Chain().to(DEVICE).eval(), given)
    assert isinstance(fast._program, background_compile.Later)
    return fast


@torch.no_grad()
@pytest.mark.parametrize(("spare", "calls"), [(True, 10), (False, 100)])
def test_it_begins_sooner_where_there_is_room(
    fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch, spare: bool, calls: int
) -> None:
    monkeypatch.setattr(idle_resources, "spare", lambda device: spare)
    given, fake.ended = x(), False
    fast = optimized(given)
    for _ in range(calls - 1):
        fast(given)
    assert fake.started == 0
    fast(given), fast(given)
    assert fake.started == 1


@torch.no_grad()
def test_one_model_at_a_time(fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_resources, "spare", lambda device: True)
    given, fake.ended = x(), False
    first, second = optimized(given), optimized(given)
    for _ in range(12):
        first(given), second(given)
    assert fake.started == 1
    fake.ended = True
    for _ in range(3):
        second(given)
    assert fake.started == 2


@torch.no_grad()
def test_what_it_takes_is_counted(
    fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison waits until it and the beginning are within the share of the work done."""
    monkeypatch.setattr(idle_resources, "spare", lambda device: True)
    monkeypatch.setattr(background_compile, "FIXED_S", 0.0)
    given = x()
    fast = optimized(given)
    waiting = fast._program
    while waiting.job is None:
        fast(given)
    monkeypatch.setattr(background_compile, "SHARE", 0.05)
    waiting.spent_s = 1.0
    for _ in range(5):
        fast(given)
    assert fast._program is waiting
    earned = (waiting.look_at - 5) * waiting.each_s
    assert earned == pytest.approx(20.0, rel=0.01)


@torch.no_grad()
def test_nothing_is_compared_where_memory_is_the_callers(
    fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(idle_resources, "spare", lambda device: True)
    monkeypatch.setattr(idle_resources, "fits", lambda device, nbytes: asked.append(nbytes))
    given = x()
    fast = optimized(given)
    for _ in range(30):
        fast(given)
    assert fake.started == 0
    assert set(asked) == {2 * 8 * (48 * 32 + 48 + 48 + given.numel())}  # in float64, and again
    monkeypatch.setattr(idle_resources, "fits", lambda device, nbytes: True)
    for _ in range(20):
        fast(given)
    assert fake.started == 1
    assert not isinstance(fast._program, background_compile.Later)


def test_a_gpu_counts_what_pytorch_holds_and_does_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = torch.device("cuda:0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (2 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: 10 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: 7 * GIB)
    assert idle_resources.fits(device, 5 * GIB)
    assert not idle_resources.fits(device, 5 * GIB + 1)
    assert idle_resources.fits(torch.device("cpu"), 1 << 60)


def test_compilers_give_way_and_take_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, ...]] = []
    now = os.getpriority(os.PRIO_PROCESS, 0)
    monkeypatch.setattr(os, "setpriority", lambda *asked: given.append(asked))
    compile_workers.yield_priority(os.getpid(), 0)
    compile_workers.yield_priority(os.getpid(), now + 7)
    compile_workers.yield_priority(os.getpid(), now - 3)
    assert given == [(os.PRIO_PROCESS, os.getpid(), now + more) for more in (7, 0)]


def test_where_no_process_can_stand_back_it_is_as_nice_as_can_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[tuple[int, ...]] = []
    monkeypatch.setattr(os, "setpriority", lambda *asked: given.append(asked))
    monkeypatch.delattr(os, "SCHED_IDLE", raising=False)
    compile_workers.lower_priority(os.getpid())
    assert given == [(os.PRIO_PROCESS, os.getpid(), 19)]


def test_threads_change_sooner_while_the_compiler_is_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, seen = sys.getswitchinterval(), list[float]()

    def imported(name: str) -> Any:
        seen.append(sys.getswitchinterval())
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", imported)
    background_compile._imported()
    assert seen == [pytest.approx(background_compile.SWITCH_S)]
    assert sys.getswitchinterval() == before


def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **given: Any) -> torch.device:
    """A machine of 64 cores, idle but for what is given, and a GPU."""
    now = {"load": 2.0, "usable": 64, "quota": "max 100000", "free": 100, "device": 10, **given}
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "getloadavg", lambda: (now["load"], 0.0, 0.0))
    monkeypatch.setattr(settings, "usable_cores", lambda: now["usable"])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (now["device"] * GIB, 80 * GIB))
    files = {
        "LIMIT": f"{now.get('limit', 'max')}\n",
        "USED": f"{now.get('used', 0)}\n",
        "FREE": f"MemTotal:  1 kB\nMemAvailable:   {now['free'] * 2**20} kB\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(idle_resources, name, tmp_path / name)
    (tmp_path / "QUOTA").write_text(f"{now['quota']}\n")
    monkeypatch.setattr(settings, "QUOTA", tmp_path / "QUOTA")
    return torch.device("cuda:0")


def test_two_threads_that_import_leave_the_programs_own_interval() -> None:
    """The second found the first one's, and put that back last."""
    before, inside, over = sys.getswitchinterval(), threading.Event(), threading.Event()

    def first() -> None:
        with background_compile._yielding():
            inside.set()
            over.wait(0.3)

    def second() -> None:
        with background_compile._yielding():
            over.set()
            one.join(10)

    one, two = threading.Thread(target=first), threading.Thread(target=second)
    try:
        one.start()
        assert inside.wait(10)
        two.start()
        one.join(10)
        two.join(10)
        assert sys.getswitchinterval() == before
    finally:
        sys.setswitchinterval(before)


def test_a_gpu_with_idle_cores_and_memory_has_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert idle_resources.spare(machine(monkeypatch, tmp_path))
    assert not idle_resources.spare(torch.device("cpu"))  # there the cores do the model's work
    assert not idle_resources.spare(torch.device("mps"))


@pytest.mark.parametrize(
    "busy",
    [
        {"load": 60.0},
        {"usable": 4},
        {"quota": "400000 100000"},
        {"free": 4},
        {"limit": 20 * GIB, "used": 10 * GIB},
        {"device": 1},
    ],
)
def test_a_small_or_busy_one_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, busy: dict[str, Any]
) -> None:
    assert not idle_resources.spare(machine(monkeypatch, tmp_path, **busy))


def test_what_cannot_be_told_counts_as_taken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = machine(monkeypatch, tmp_path)
    for name in ("LIMIT", "USED"):  # not in a container: the machine's own numbers
        monkeypatch.setattr(idle_resources, name, tmp_path / "missing")
    monkeypatch.setattr(settings, "QUOTA", tmp_path / "missing")
    assert idle_resources.spare(device)
    monkeypatch.setattr(idle_resources, "FREE", tmp_path / "missing")
    assert not idle_resources.spare(device)


def test_without_a_load_there_is_no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = machine(monkeypatch, tmp_path)
    monkeypatch.delattr(os, "getloadavg")
    assert not idle_resources.spare(device)


def test_a_gpu_that_does_not_answer_has_no_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = machine(monkeypatch, tmp_path)

    def broken(d: Any) -> Any:
        raise RuntimeError("no device")

    monkeypatch.setattr(torch.cuda, "mem_get_info", broken)
    assert not idle_resources.spare(device)


class Boxed:
    """Holds an output; nothing that torch.export knows, or that attributes make another of."""

    def __init__(self, y: Any) -> None:
        self.y = y

    def __getstate__(self) -> Any:
        return self.y


class Boxing(Chain):
    """One graph for Dynamo, none for torch.export."""

    def forward(self, x: torch.Tensor) -> Any:
        return Boxed(super().forward(x))


class Holding(Chain):
    """Gives an object of a class that attributes make another of."""

    class Held:
        y: Any

    def forward(self, x: torch.Tensor) -> Any:
        held = self.Held()
        held.y = super().forward(x)
        return held


@torch.no_grad()
def test_a_program_inside_objects_waits_too(
    fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_resources, "spare", lambda device: True)
    model, given = Holding().to(DEVICE).eval(), x()
    fast: Any = tensorlogic.optimize(model, given)
    assert isinstance(fast._program.program, background_compile.Later), fast.report
    for _ in range(40):
        same(fast(given).y, model(given).y)
    assert fake.started == 1
    assert type(fast._program.program).__name__ == "Program"
    assert any(r.op == comparison.OP and not r.refused for r in fast.report.rows)


def waiting(fast: Any) -> list[Any]:
    found = [p for piece in fast._program.pieces for p in piece.programs.values()]
    return [p for p in found if isinstance(p, background_compile.Later)]


@torch.no_grad()
def test_a_graph_of_dynamos_waits_too(
    fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_resources, "spare", lambda device: True)
    model, given = Boxing().to(DEVICE).eval(), x()
    fast: Any = tensorlogic.optimize(model, given)
    assert len(waiting(fast)) == 1, fast.report
    for _ in range(40):
        same(fast(given).y, model(given).y)
    assert fake.started == 1
    assert not waiting(fast)
    assert "background" in str(fast.report)
    assert any(r.op == comparison.OP and not r.refused for r in fast.report.rows)
    assert [type(p).__name__ for p in fast._program.programs] == ["Program"]


@torch.no_grad()
def test_layers_that_share_a_graph_take_turns(
    fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_resources, "spare", lambda device: True)
    given = torch.randn(4, 8, device=DEVICE)
    fast: Any = tensorlogic.optimize(Layers().to(DEVICE).eval(), given)
    shared = [p for p in fast._program.pieces if len(p.programs) > 1]
    assert shared, fast.report
    layers = len(waiting(fast))
    assert layers == sum(len(p.programs) for p in fast._program.pieces)
    fake.ended = False
    for _ in range(30):
        same(fast(given), Layers.forward(fast, given))
    assert fake.started == 1  # one at a time
    fake.ended = True
    for _ in range(30 * layers):
        same(fast(given), Layers.forward(fast, given))
    assert fake.started == layers
    assert not waiting(fast)


@torch.no_grad()
def test_what_fails_while_it_is_compared_leaves_calls_as_they_were(
    fake: Fake, background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_resources, "spare", lambda device: True)

    def failing(*_: Any) -> Any:
        raise AssertionError("expected size 256==256, stride 1==1024")

    monkeypatch.setattr(comparison.Contest, "compared", failing)
    given = x()
    fast = optimized(given)
    for _ in range(30):
        same(fast(given), Chain.forward(fast, given))
    assert fake.started == 1
    assert not isinstance(fast._program, background_compile.Later)
