"""What tests of the benchmark share: runs on one thread in milliseconds, and results whose times are given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorlogic.bench import machine_limits, measure_case, session
from tensorlogic.bench.result_file import OURS, Ceilings, Results, Row

TINY = measure_case.Effort(5, 0.005)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Short measurements, on one thread (other work on the machine then disturbs little)."""
    monkeypatch.setattr(measure_case, "QUICK", TINY)
    monkeypatch.setattr(machine_limits, "FOOTPRINTS", {"cpu": (1 << 12, 1 << 16)})
    monkeypatch.setattr(machine_limits, "SIDES", {"cpu": (64,)})
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(path: Path, **about: Any) -> Results:
    return session.bench(quick=True, device="cpu", json=path, **about)


def made(
    ours: float, eager: float, *, size: int = 64, status: str = "ok", host: bool = False
) -> Row:
    """A row with given microseconds."""
    times = {
        OURS: [ours * f for f in (1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0)],
        "separate": [eager] * 7,
    }
    return Row(f"fusion linear {size} f16", "fusion", "linear", "", size, "f16", status=status, baselines=["separate"], device_us=times if status == "ok" else {}, host_us=times if host else {}, flops=1e6, bytes=1e4, candidate="torch.eager")  # fmt: skip


def held(
    *given: Row, device: str = "A", kind: str = "cpu", torch_version: str = "2.13.0"
) -> Results:
    environment = {
        "device": device,
        "kind": kind,
        "threads": 2,
        "torch": torch_version,
        "triton": None,
        "driver": "x",
        "libraries": [],
    }
    machine = {"id": "1", "environment": environment, "tensorlogic": "0.1.0"}
    return Results(
        machine,
        {"before": {"time": "2026-01-02T03:04:05+00:00"}},
        Ceilings([(8192, 1.0), (131072, 4.0)], {"f16": 100.0}, {"torch": 1.0}),
        list(given),
        complete=True,
    )
