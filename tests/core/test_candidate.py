"""Candidates of others: `tensorlogic.core` has all that they are written with, and who looks elsewhere is told so."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import tensorlogic
from tensorlogic import core
from tensorlogic.core import policy
from tensorlogic.core.candidate import Candidate, Failed, failure_reason
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.system.compile_pool import CompileFailure

WRITTEN_WITH = ("EAGER", "OPS", "Candidate", "Gradient", "Key", "Op", "TensorSpec")
PLUGIN = """
import torch
from tensorlogic.core import EAGER, OPS, Candidate, Gradient, Key, Op, TensorSpec

assert EAGER in OPS["relu"].candidates
SERVED: list[str] = []

def supports(key: Key) -> str | None:
    spec = key.spec("x")
    assert isinstance(spec, TensorSpec)
    return None if spec.dtype == "f32" else "f32 only"

def bind(key, config, device):
    def launch(x):
        SERVED.append(key.text)
        return (x.clamp_min(0),)
    return launch

def register(ops: dict[str, Op]) -> None:
    assert isinstance(ops["relu"].gradient, Gradient)
    ops["relu"].add(Candidate("somebody.clamp", bind=bind, supports=supports))
"""
Install = Callable[[str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """install(source): a distribution whose module `somebodys_plugin` is an entry point, loaded with the CPU's candidates."""
    candidate_loading.ready("cpu")
    before = {name: dict(op.candidates) for name, op in OPS.items()}

    def make(source: str) -> None:
        info = tmp_path / "somebodys_plugin-1.0.dist-info"
        info.mkdir()
        (tmp_path / "somebodys_plugin.py").write_text(source)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-plugin\n")
        (info / "entry_points.txt").write_text(
            f"[{candidate_loading.GROUP}]\nsomebody = somebodys_plugin:register\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path))
        importlib.invalidate_caches()
        candidate_loading._READY.difference_update({"plugins", "cpu"})
        candidate_loading.ready("cpu")

    yield make
    for name, op in OPS.items():
        op.candidates.clear()
        op.candidates.update(before[name])
    sys.modules.pop("somebodys_plugin", None)
    policy.forget_entries()


def test_core_hands_out_what_candidates_are_written_with() -> None:
    for name in WRITTEN_WITH:
        found = getattr(core, name)
        home = {"Key": "key", "TensorSpec": "key", "Candidate": "candidate", "EAGER": "candidate"}
        module = importlib.import_module(f"tensorlogic.core.{home.get(name, 'op')}")
        assert found is getattr(module, name), name


def test_a_plug_in_written_with_core_serves(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(PLUGIN)
    assert not caplog.records
    candidate = OPS["relu"].candidates["somebody.clamp"]
    assert isinstance(candidate, Candidate)
    assert not candidate.trusted
    x = torch.randn(3, 5)
    with tensorlogic.policy(force={"relu": "somebody.clamp"}):
        assert torch.equal(tensorlogic.relu(x), torch.relu(x))
    assert len(sys.modules["somebodys_plugin"].SERVED) > 1  # checked on this key, then served


@pytest.mark.parametrize("line", ["from tensorlogic.op import OPS", "import tensorlogic.candidate"])
def test_who_imports_from_a_place_that_is_gone_is_told_of_core(
    line: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    before = list(OPS["relu"].candidates)
    with caplog.at_level(logging.WARNING, "tensorlogic"):
        install(PLUGIN.replace("import torch\n", f"{line}\n", 1))
    (record,) = [r for r in caplog.records if "were not loaded" in r.getMessage()]
    said = record.getMessage()
    assert "somebody (somebodys_plugin:register)" in said
    assert "ModuleNotFoundError" in said
    assert said.endswith(candidate_loading.OWN_PLACE)
    assert "tensorlogic.core" in said
    assert list(OPS["relu"].candidates) == before


def test_another_missing_module_is_no_matter_of_core(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("import nobody_has_this\n" + PLUGIN)
    (record,) = [r for r in caplog.records if "were not loaded" in r.getMessage()]
    assert "nobody_has_this" in record.getMessage()
    assert "tensorlogic.core" not in record.getMessage()


def test_what_failed_is_said_in_one_way() -> None:
    assert failure_reason(ValueError("no\n  luck")) == "failed: ValueError: no luck"
    assert failure_reason(MemoryError("all gone")) == "out of memory: all gone"
    assert failure_reason(CompileFailure("too much")) == "failed to compile: too much"
    again = Failed(CompileFailure("too much"), entrant := object())
    assert (failure_reason(again), again.entrant) == ("failed to compile: too much", entrant)
