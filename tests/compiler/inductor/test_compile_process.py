"""Inductor itself, where other tests let something stand for it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import tensorlogic
from tensorlogic.compiler.inductor import comparison, compile_process
from tensorlogic.measure import timer
from tensorlogic.plans import open_stores
from tensorlogic.system import settings

from ...support.inductor_fakes import DEVICE, Normed, same, x

pytestmark = pytest.mark.skipif(
    DEVICE == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))),
    reason="no C++ compiler",
)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def shared(allowed: None, asked: Path, fresh_store: None) -> None:
    """One folder of Inductor's for all tests: in a new one it asks the C++ compiler for all that this CPU can, which takes 8 s."""
    settings.cache_folder().mkdir()
    (settings.cache_folder() / "inductor").symlink_to(asked)


@pytest.mark.slow
def test_a_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def agrees(fast: nn.Module) -> None:
        given, twin = x(), model()
        twin.load_state_dict(fast.state_dict())
        out, plain = fast(given), twin(given)
        same(out, plain)
        same(
            torch.autograd.grad(out.square().sum(), [*fast.parameters()]),
            torch.autograd.grad(plain.square().sum(), [*twin.parameters()]),
        )
        same([*fast.buffers()], [*twin.buffers()])

    def model() -> nn.Module:
        made = nn.Sequential(Normed(), nn.Linear(48, 32), nn.GELU())
        return made.to(DEVICE).train()

    monkeypatch.setattr(comparison, "GAIN", 1e9)
    monkeypatch.setattr(timer.Samples, "ratio", lambda self, a, b: (0.5, 0.4, 0.6))
    original = model()
    fast = tensorlogic.optimize(original, x(), training=True, budget_s=200)
    assert fast.report.outcome == "compiled", fast.report
    agrees(fast)
    open_stores.forget()
    monkeypatch.setattr(
        compile_process, "Compiling", None
    )  # loaded, as by a process that comes later
    fast = tensorlogic.optimize(original, x(), training=True)
    assert fast.report.outcome == "compiled", fast.report
    agrees(fast)
