"""How transfers are cut and shared among threads is timed once a machine, and repeats."""

from __future__ import annotations

import itertools
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import tensorlogic
from tensorlogic.memory import pinned_buffers, transfer, transfer_tuning
from tensorlogic.memory.transfer_tuning import MIB, Rule, Stores
from tensorlogic.native import cpu_library
from tensorlogic.plans import open_stores

from ..support.driver.copies import Engine

CPU = torch.device("cpu")
FOREVER = float("inf")


@pytest.fixture(autouse=True)
def many_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_tuning, "processors", lambda: 16)


def test_each_size_gets_the_threads_and_stores_that_are_fastest() -> None:
    fastest = {
        16: Rule(14, Stores.PAST_CACHES),
        64: Rule(15, Stores.BOTH),
        128: Rule(15, Stores.GIVEN_UP),
    }

    def timer(rule: Rule, nbytes: int) -> float:
        return (1.0 - 0.1 * (rule == fastest[nbytes // MIB])) * nbytes

    found = transfer_tuning.chosen(True, timer, FOREVER)
    assert found == tuple(fastest.values())
    assert transfer_tuning.chosen(False, timer, FOREVER)[0] == fastest[16]
    assert [transfer_tuning.size_class(n * MIB) for n in (1, 16, 32, 33, 64, 96, 97, 256)] == [
        0,
        0,
        0,
        1,
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize("up", [True, False])
def test_what_is_hardly_better_changes_nothing(up: bool) -> None:
    usual = transfer_tuning.usual(up)
    assert (
        transfer_tuning.chosen(up, lambda rule, n: 1.0 - 0.04 * (rule not in usual), FOREVER)
        == usual
    )
    assert (
        transfer_tuning.chosen(up, lambda rule, _: 1.0 + (rule in usual), 0.0) == usual
    )  # no time


def test_a_few_slow_transfers_change_nothing() -> None:
    for slow in itertools.combinations(range(transfer_tuning.ROUNDS), 3):
        turn = dict.fromkeys(transfer_tuning.TIMED, -2)

        def timer(
            rule: Rule, nbytes: int, slow: tuple[int, ...] = slow, turn: dict[int, int] = turn
        ) -> float:
            if rule != transfer_tuning.usual(True)[transfer_tuning.size_class(nbytes)]:
                return 1.1
            turn[nbytes] += 1
            return 3.0 if turn[nbytes] in slow else 1.0

        assert transfer_tuning.chosen(True, timer, FOREVER) == transfer_tuning.usual(True)


def test_few_processors_have_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_tuning, "processors", lambda: 2)
    met: set[int] = set()
    transfer_tuning.chosen(True, lambda rule, _: [1.0, met.add(rule.workers)][0] or 1.0, FOREVER)
    assert met == {1}


def test_what_was_found_is_noted_and_read_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path))
    open_stores.forget()
    try:
        assert transfer_tuning.known(CPU, True) is None
        found = transfer_tuning.settle(
            CPU, True, lambda rule, _: float(rule.workers), time.perf_counter()
        )
        assert {rule.workers for rule in found} == {7}
        open_stores.forget()  # as another process
        assert transfer_tuning.known(CPU, True) == found
        assert transfer_tuning.known(CPU, False) is None
        (path,) = tmp_path.rglob("*.transfers")
        text = path.read_text()
        older = text.replace("7 1 7 1 7 1", "7 524288 4194304 10 524288 4194304")
        for spoilt in (
            older,
            text.replace(" 7 ", " 99 "),
            text.replace(" 7 ", " x "),
            text[:-5] + "\n",
        ):
            assert spoilt != text
            path.write_text(spoilt)
            open_stores.forget()
            assert transfer_tuning.known(CPU, True) is None
        path.write_text(older + text)  # found again by this version
        open_stores.forget()
        assert transfer_tuning.known(CPU, True) == found
    finally:
        monkeypatch.undo()
        open_stores.forget()


def test_rules_are_timed_after_a_few_large_transfers_and_in_calm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mover = object.__new__(pinned_buffers.Stager)
    mover.device, mover.up, mover.rules = CPU, True, transfer_tuning.usual(True)
    mover.copy, mover.left = (lambda *_: 0), pinned_buffers.MET
    settled: list[int] = []
    calm = [True]
    monkeypatch.setattr(pinned_buffers.Stager, "_by", lambda *_: None)
    monkeypatch.setattr(pinned_buffers.Stager, "_settle", lambda self: settled.append(self.left))
    monkeypatch.setattr(pinned_buffers.capture_state, "can_call_now", lambda _: calm[0])
    large, small = (
        torch.empty(n, dtype=torch.uint8) for n in (pinned_buffers.LARGE, pinned_buffers.LARGE - 1)
    )
    for t in (small, large, small, large, large):
        mover.here(t, t, True)
    assert (mover.left, settled) == (1, [])
    calm[0] = False  # while another thread captures, say
    mover.here(large, large, True)
    assert (mover.left, settled) == (1, [])
    calm[0] = True
    for _ in range(3):
        mover.here(large, large, True)
    assert (mover.left, settled) == (0, [0])
    mover.left = -1  # as two threads at a time might leave it
    mover.here(large, large, True)
    assert (mover.left, settled) == (-1, [0])


@pytest.mark.skipif(cpu_library.available() is not None, reason="needs the native library")
@pytest.mark.parametrize("up", [True, False])
def test_rules_are_timed_on_on_the_way_that_transfers_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, up: bool
) -> None:
    engine = Engine()
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(transfer_tuning, "TIMED", (1 << 18, 1 << 19, MIB))
    monkeypatch.setattr(transfer_tuning, "WALKED", 4 * MIB)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(synchronize=engine.finish)
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(transfer_tuning, "processors", lambda: 9)
    open_stores.forget()
    mover = object.__new__(pinned_buffers.Stager)
    mover.device, mover.up, mover.lock = CPU, up, threading.Lock()
    mover.memory = torch.empty(MIB, dtype=torch.uint8)
    mover.number = cpu_library.op("staging_open")(mover.memory, [1, 2, 3, 4, 5], engine.calls, 0)
    mover.copy = pinned_buffers._copy()
    try:
        mover._settle()
        assert engine.moves > 20
        assert mover.rules == transfer_tuning.known(CPU, up)
        data = torch.randint(0, 256, (3 * MIB + 5,), dtype=torch.uint8)
        for rule in {*mover.rules, *transfer_tuning.others(up)}:
            other = torch.zeros_like(data)
            mover._by(rule, data, other, data.nbytes)
            engine.finish()
            assert torch.equal(data, other)
    finally:
        monkeypatch.undo()
        open_stores.forget()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_machine_finds_its_rules_after_a_few_transfers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path))  # not what another process notes
    monkeypatch.setattr(pinned_buffers, "_STAGERS", {})
    monkeypatch.setattr(transfer, "_QUICK", {})
    open_stores.forget()
    try:
        host = torch.randint(0, 256, (16 * MIB,), dtype=torch.uint8)
        for _ in range(pinned_buffers.MET + 1):
            there = tensorlogic.to(host, "cuda")
            assert torch.equal(tensorlogic.to(there, "cpu"), host)
        for up in (True, False):
            mover = pinned_buffers.stager(0, up)
            assert mover.left == 0
            assert transfer_tuning.known(mover.device, up) == mover.rules
        if cpu_library.calls_available() is None:
            assert set(transfer._QUICK) == {"cuda", "cpu"}
    finally:
        monkeypatch.undo()
        open_stores.forget()
