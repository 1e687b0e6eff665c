"""The command line where the environment is not as usual: lockfiles, settings and terminals that do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tensorlogic import cli, doctor, doctor_cpu, policies

ONE = ["--size", "64", "--dtype", "f32", "--device", "cpu"]


@pytest.fixture
def lockfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """With the plan of add_relu at 64."""
    path = tmp_path / "lock.json"
    assert cli.main(["tune", "--op", "add_relu", *ONE]) == 0
    assert cli.main(["plans", "export", str(path), "--device", "cpu"]) == 0
    capsys.readouterr()
    return path


def test_commands_that_measure_do_so_beside_a_lockfile_of_the_environment(
    lockfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with policies.use(replace(policies.ROOT, lockfile=lockfile, entries={})):
        assert cli.main(["tune", "--op", "mul_relu", *ONE]) == 0
        assert "1 keys measured" in capsys.readouterr().out
        assert cli.main(["explain", "add_relu", *ONE]) == 0
        assert "(from: lockfile)" in capsys.readouterr().out
        assert cli.main(["explain", "mul_relu", *ONE]) == 0  # measured, and not locked
        said = capsys.readouterr().out
    assert "chosen: torch.eager" in said
    assert " us" in said


def test_bench_measures_beside_a_lockfile_of_the_environment(
    lockfile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["bench", "--quick", "--op", "mul_relu", *ONE, "--json", str(tmp_path / "a.json")]
    with policies.use(replace(policies.ROOT, lockfile=lockfile, entries={})):
        assert cli.main(tokens) == 0
    assert "not timed" not in capsys.readouterr().out


def test_an_unusable_lockfile_is_said_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lock.json"
    monkeypatch.setenv("TENSORLOGIC_LOCKFILE", str(path))
    monkeypatch.setattr(doctor_cpu, "compared", lambda: iter(()))
    with policies.use(policies._root()):
        assert cli.main(["explain", "add_relu", *ONE, "--no-measure"]) == 2
        assert "does not exist" in capsys.readouterr().err
        found = {f.about: f for f in doctor.examine()}["TENSORLOGIC_LOCKFILE"]
        assert (found.state, "does not exist" in found.found) == ("broken", True)
        path.write_text("{}")
        assert cli.main(["doctor"]) == 1
    assert "not a plan file" in capsys.readouterr().out


def test_doctor_compares_beside_a_lockfile(lockfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(doctor_cpu, "_pair", lambda *_: seen.append(policies.current().lockfile))
    with policies.use(replace(policies.ROOT, lockfile=lockfile, entries={})):
        next(doctor_cpu.compared())
    assert seen == [None]


def test_a_terminal_without_our_signs_shows_others() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensorlogic", "explain", "add_relu", *ONE],
        capture_output=True, text=True, timeout=60, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


def test_an_import_that_failed_may_be_tried_again() -> None:
    text = """
import os, torch
try:
    import tensorlogic
except ValueError as problem:
    assert "TENSORLOGIC_ENABLE is 'yes'" in str(problem)
os.environ["TENSORLOGIC_ENABLE"] = "0"
import tensorlogic
assert tensorlogic.relu(torch.ones(3)).sum() == 3
"""
    env = os.environ | {"TENSORLOGIC_ENABLE": "yes"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", text],
        capture_output=True, text=True, timeout=60, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
