"""The command that checks random cases: nothing wrong with what is shipped, and a planted wrong candidate shows."""

from __future__ import annotations

import importlib
import importlib.util
import math
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tensorlogic.core.op import OPS


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "device" / "random_cases.py"
    monkeypatch.syspath_prepend(str(path.parent))
    spec = importlib.util.spec_from_file_location("random_cases", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "random_cases", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "random_cases.py",
            "--seed",
            "3",
            "--count",
            "20",
            "--ops",
            "add_relu",
            "--elements",
            "4096",
        ],
    )
    return module


def test_what_is_shipped_is_right(command: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main() == 0
    assert "20 cases of seed 3" in capsys.readouterr().out


def test_cases_of_a_family_differ_only_in_what_needs_no_other_kernel(command: ModuleType) -> None:
    length = importlib.import_module("drawn_cases").Length(24)
    drawn = {length.draw(random.Random(i)) for i in range(50)}
    assert drawn == {24} | {n for n in range(17, 33) if math.gcd(n, 16) == 8}
    ops = [OPS["matmul"]]
    first = [[key.text for _, key in keys] for *_, keys in command.cases(1, 5, ops, 4096, [])]
    again = [[key.text for _, key in keys] for *_, keys in command.cases(1, 5, ops, 4096, [])]
    assert first == again
    assert len(first) == command.FAMILY
    assert len({tuple(case) for case in first}) > 1


def test_only_cases_that_a_named_candidate_serves(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--candidates", "torch.inplace", "--workers", "0"]
    monkeypatch.setattr(sys, "argv", [*command.sys.argv[:-4], *asked, "--elements", "4096"])
    assert command.main() == 0
    counted = [line for line in capsys.readouterr().out.splitlines() if line.endswith("right ")]
    assert counted
    assert all(" torch.inplace right" in line for line in counted), counted


@pytest.mark.slow
def test_workers_share_the_families_and_survive_each_other(
    command: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "x",
            "--seed",
            "3",
            "--count",
            "40",
            "--ops",
            "sum",
            "--workers",
            "2",
            "--elements",
            "512",
        ],
    )
    assert command.main() == 0
    assert "40 cases of seed 3 from 0" in capsys.readouterr().out
    dead = command.Workers(1, [sys.executable, "-c", "import os; os._exit(7)"], range(1))
    (found,) = dead.results()
    assert "ended (7)" in found["wrong"][0]


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


@pytest.mark.parametrize(("size", "found"), [(2, "unlucky"), (4096, "wrong")])
def test_an_error_that_chance_makes_of_few_elements_is_not_called_wrong(
    command: ModuleType, monkeypatch: pytest.MonkeyPatch, size: int, found: str
) -> None:
    op = OPS["add_relu"]
    monkeypatch.setattr(op, "candidates", dict(op.candidates))

    @op.candidate("planted.upwards")
    def upwards(a: Tensor, b: Tensor, save: bool) -> tuple[Tensor, ...]:
        return (torch.relu(a + b) * (1 + torch.finfo(a.dtype).eps),)

    key = op.key((torch.ones(size).half(), torch.ones(size).half(), False), "inference")
    trial = command.Trial(0, op, key, op.candidates["planted.upwards"], {})
    for draw in range(8):  # one of two elements may be 0 in all of them
        checker = command.Checker(op, key, command.DEVICE, 100 + draw)
        if (said := command.verdict(trial, checker)) != "right":
            break
    assert said.split(":")[0] == found, said
