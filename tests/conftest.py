"""Every test has its own plan store and measures nothing it did not ask for."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

if (
    not torch.cuda.is_available()
):  # kernels run in Triton's interpreter; it must be asked for before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tensorlogic
from tensorlogic.compiler import program_search
from tensorlogic.core.candidate import Candidate
from tensorlogic.cpu_overrides import overrides
from tensorlogic.measure import interference, timer
from tensorlogic.mixed_precision import candidate_order
from tensorlogic.native import cpu_library
from tensorlogic.plans import open_stores

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
    from .support.interpreting import quicken

    quicken()


@pytest.fixture(autouse=True)
def fresh_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of its own, no background measuring, seeded generators."""
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "0")  # seconds a model, where a test does not ask
    monkeypatch.setattr(
        interference, "DRIFT", math.inf
    )  # whoever else runs here is waited for by nobody
    monkeypatch.setitem(
        candidate_order.GUARD_US, "cpu", candidate_order.GUARD_US["cpu"]
    )  # what is learned is forgotten
    open_stores.forget()
    torch.manual_seed(0)
    with tensorlogic.policy(tune="off"):
        yield
    open_stores.forget()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch computes in the calling thread alone: what another one takes for its share is no work of this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def needs(there: bool, what: str) -> None:
    if not there:
        pytest.skip(f"needs {what}; the native library takes {cpu_library.isa()} here")


@pytest.fixture
def amx() -> None:
    """Products by AMX tiles are what the native library takes."""
    needs(cpu_library.isa() == "amx", "AMX tiles")


@pytest.fixture
def avx512_bf16() -> None:
    """The processor multiplies pairs of bfloat16 by AVX-512."""
    there = cpu_library.available() is None and "avx512_bf16" in cpu_library.op("features")().split(
        ","
    )
    needs(there, "AVX-512 with pairs of bfloat16")


@pytest.fixture
def no_f16() -> None:
    """PyTorch multiplies float16 without hardware for it."""
    needs(overrides.no_float16(), "a processor without float16 products")


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor may compete; Triton's interpreter is no candidate."""
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "1")
    plain, slow = Candidate.unfit, not torch.cuda.is_available()
    monkeypatch.setattr(
        Candidate,
        "unfit",
        lambda self, key: "slow" if slow and self.id.startswith("triton") else plain(self, key),
    )


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever optimize finds right counts as faster."""
    torch._dynamo.reset()
    monkeypatch.setattr(program_search, "MUST_GAIN", 1e9)
    monkeypatch.setattr("tensorlogic.compiler.tune.region_tuner.LEAST_GAIN", 1e9)
    monkeypatch.setattr("tensorlogic.compiler.tune.region_tuner.USUAL_SHARE_S", 0.001)
    monkeypatch.setattr(timer.Samples, "ratio", lambda self, a, b: (0.5, 0.4, 0.6))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, allowed: None) -> Any:
    """What stands for Inductor and its clock."""
    from tests.support.inductor_fakes import Fake

    return Fake(monkeypatch)


# The fast suite stays fast: a test that takes longer is marked slow, and runs with all others in `make test-all`.
LIMIT_S = 2.0
_over: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and report.duration > LIMIT_S:
        _over[report.nodeid] = report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a run of the fast suite in which a test took too long; on a busy machine it is only said."""
    if not _over or "not slow" not in session.config.option.markexpr:
        return
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > 1.5 * (os.cpu_count() or 1)
    if session.exitstatus == 0 and not busy:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if "not slow" in config.option.markexpr:
        for name, seconds in _over.items():
            line = (
                f"{name} took {seconds:.1f} s: mark it slow, or make it quicker than {LIMIT_S:g} s"
            )
            terminalreporter.write_line(line)
