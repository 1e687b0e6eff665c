"""The command that checks random cases: nothing wrong with what is shipped, and a planted wrong candidate shows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tensorlogic.op import OPS


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[1] / "benchmarks" / "device" / "random_cases.py"
    spec = importlib.util.spec_from_file_location("random_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "random_cases", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        sys, "argv", ["random_cases.py", "--seed", "3", "--count", "24", "--ops", "add_relu"]
    )
    return module


def test_what_is_shipped_is_right(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main() == 0
    assert "24 cases of seed 3" in capsys.readouterr().out


def test_a_wrong_candidate_is_named(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OPS["add_relu"], "candidates", dict(OPS["add_relu"].candidates))

    @OPS["add_relu"].candidate("planted.off_by_one")
    def off_by_one(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
        y = torch.relu(a + b)
        y.view(-1)[-1:] += 1
        return (y,)

    assert command.main() == 1
    assert "planted.off_by_one {}: wrong" in capsys.readouterr().out
