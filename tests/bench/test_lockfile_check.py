"""Lockfiles of the command line: verify finds what no longer holds, import refuses another machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.bench import lockfile_check
from tensorlogic.core.candidate import Candidate
from tensorlogic.core.op import OPS
from tensorlogic.plans import lockfile as plans_lockfile
from tensorlogic.plans import open_stores
from tensorlogic.plans import plan as plans_plan

CPU = torch.device("cpu")


@pytest.fixture
def planted() -> Iterator[Callable[..., None]]:
    """Candidates of add_relu that go again after the test."""
    op = OPS["add_relu"]

    def plant(id: str, fn: Callable[..., Any]) -> None:
        op.add(Candidate(id, bind=lambda key, config, device: fn))

    before = dict(op.candidates)
    yield plant
    op.candidates.clear()
    op.candidates.update(before)


def lockfile(path: Path, candidate: str) -> Path:
    """One plan of add_relu at 64 by 64, with that candidate."""
    a = torch.randn(64, 64)
    with torch.no_grad():
        tensorlogic.tune(tensorlogic.add_relu, a, a + 1)
    store = open_stores.current(CPU)
    plan = next(iter(store.plans()))
    evidence = [
        plans_plan.Evidence(
            candidate, {}, "measured", 1.0, 1.0, source=OPS["add_relu"].candidates[candidate].source
        )
    ]
    locked = replace(
        plan,
        eager=candidate,
        eager_config={},
        captured=candidate,
        captured_config={},
        evidence=evidence,
    )
    plans_lockfile.export_lockfile(path, [locked], [store.environment])
    return path


def test_verify_finds_what_no_longer_holds(tmp_path: Path, planted: Callable[..., None]) -> None:
    def slow(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        time.sleep(5e-4)
        return (torch.relu(a + b),)

    broken = [False]

    def breaks(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor]:
        return (torch.relu(a + b) + broken[0],)

    planted("test.slow", slow)
    planted("test.breaks", breaks)
    found = lockfile_check.verify(lockfile(tmp_path / "a.json", "torch.eager"), 10)
    assert [f.state for f in found] == ["good"]
    found = lockfile_check.verify(lockfile(tmp_path / "b.json", "test.slow"), 10)
    assert [(f.state, f.bad) for f in found] == [("slow", True)]
    path = lockfile(tmp_path / "c.json", "test.breaks")
    broken[0] = True
    found = lockfile_check.verify(path, 10)
    assert found[0].state == "wrong"
    assert "relative error" in found[0].detail
    del OPS["add_relu"].candidates["test.breaks"]
    assert lockfile_check.verify(path, 10)[0].state == "missing"


def test_import_refuses_another_machine(tmp_path: Path) -> None:
    path = lockfile(tmp_path / "a.json", "torch.eager")
    store = open_stores.current(CPU)
    store.forget()
    assert lockfile_check.adopt(path, store, CPU, anywhere=False) == (1, None)
    assert len(list(store.plans())) == 1
    lock = plans_lockfile.load_lockfile(path)
    elsewhere = replace(lock.environments["cpu"], device="another processor")
    plans_lockfile.export_lockfile(path, lock.plans(), [elsewhere])
    store.forget()
    count, reason = lockfile_check.adopt(path, store, CPU, anywhere=False)
    assert (count, "measured elsewhere (another processor" in str(reason)) == (0, True)
    assert lockfile_check.adopt(path, store, CPU, anywhere=True) == (1, None)
