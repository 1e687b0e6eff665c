"""The runner of compute-sanitizer: what it makes of what the tools print, on a stand-in for them."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def sanitize() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools" / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RACE = """========= Error: Race reported between Write access at layer_norm_fwd_registers+0x45f0 in triton_layer_norm.py:38
=========     and Write access at layer_norm_fwd_registers+0x45f0 in triton_layer_norm.py:38 [1 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
READ = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at look_at+0x15a0 in triton_split.py:121
========= ERROR SUMMARY: 120732 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (0, "12 passed\n========= ERROR SUMMARY: 0 errors\n", "clean"),
        (5, "========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (1, RACE, "1 reports: layer_norm_fwd_registers"),
        (1, READ, "120832 reports: look_at"),
        (1, "FAILED tests/a.py::b\n========= ERROR SUMMARY: 0 errors\n", "nothing named, 1 tests failed"),
        (-11, "Segmentation fault", "ended with -11 before its summary"),
    ],
)  # fmt: skip
def test_what_was_named(sanitize: ModuleType, status: int, text: str, said: str) -> None:
    assert sanitize.outcome(status, text) == said


def test_all_kernel_tests_are_run(sanitize: ModuleType) -> None:
    names = {path.stem for path in sanitize.kernel_tests()}
    assert {"test_triton_rows", "test_triton_batch_norm", "test_group_norm"} <= names
    assert not {n for n in names if n.endswith("_compile")} | names & {"test_triton_launch"}
    assert all(path.is_file() for path in sanitize.kernel_tests())


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer that names something in test files called bad, and does not end in slow ones."""
    if sys.platform == "win32":
        pytest.skip("the stand-in is a script of the shell")
    path = tmp_path / "compute-sanitizer"
    path.write_text(
        '#!/bin/sh\ncase "$*" in\n*slow*) : > ${0%/*}/begun-$$; echo "========= at kernel_of_$2+0x1"; sleep 60; exit 0;;\n'
        "*bad*) echo '=========     at kernel_of_ours+0x10 in a.py:1'; echo '========= ERROR SUMMARY: 2 errors'; exit 1;;\n"
        "*) echo '========= ERROR SUMMARY: 0 errors';;\nesac\n"
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_a_table_of_what_each_tool_named(
    sanitize: ModuleType, tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tool / f"test_{name}.py" for name in ("good", "bad", "slow")]
    for path in files:
        path.touch()
    kept = tool / "table.txt"
    given = [*map(str, files), "--tools", "memcheck", "initcheck", "--table", str(kept)]
    assert sanitize.main([*given, "--seconds", "2", "--processes", "6"]) == 1
    rows = [line.split(None, 1) for line in kept.read_text().splitlines()[1:]]
    assert [name for name, _ in rows] == ["test_bad", "test_good", "test_slow"]
    assert rows[0][1].count("2 reports: kernel_of_ours") == 2
    assert rows[1][1].split() == ["clean", "clean"]
    for name in ("memcheck", "initcheck"):  # what a run had named before it was cut
        assert f"not over after 2 s, with reports: kernel_of_{name}" in rows[2][1]
    assert sanitize.main([str(files[0]), "--tools", "memcheck"]) == 0
    assert "clean" in capsys.readouterr().out


def test_an_interrupt_ends_what_runs(tool: Path) -> None:
    slow = tool / "test_slow.py"
    slow.touch()
    command = [sys.executable, str(ROOT / "tools" / "sanitize.py"), str(slow), "--processes", "3"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which programs in the background ignore
    )  # fmt: skip
    until = time.monotonic() + 30
    while len(begun := list(tool.glob("begun-*"))) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=20)
    assert "interrupted" in said
    assert process.returncode == 130
    assert len(begun) == 3
    for path in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("begun-")), 0)


def test_what_is_missing_is_named(
    sanitize: ModuleType, tool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        sanitize.main([str(tool / "absent.py")])
    assert "no such test files" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tool / "none"))
    with pytest.raises(SystemExit):
        sanitize.main([])
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
