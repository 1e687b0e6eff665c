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

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sanitize(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools" / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "sanitize", module)
    spec.loader.exec_module(module)
    return module


RACE = """========= Error: Race reported between Write access at layer_norm_fwd_registers+0x45f0 in layer_norm.py:38
=========     and Write access at layer_norm_fwd_registers+0x45f0 in layer_norm.py:38 [1 hazards]
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""
TEMPLATE = """tests/a.py::b ========= Error: Race reported between Read access at void at::native::reduce_kernel<(int)512, (int)1>(T3)+0xe800
=========     and Write access at void at::native::reduce_kernel<(int)512, (int)1>(T3)+0xe8e0 [480 hazards]
PASSED [ 50%]
tests/a.py::c PASSED [100%]
========= RACECHECK SUMMARY: 6 hazards displayed (6 errors, 0 warnings)
"""
READ = """========= Uninitialized __global__ memory read of size 4 bytes
=========     at look_at+0x15a0 in split_planes.py:121
========= ERROR SUMMARY: 120732 errors were not printed. Use --print-limit option to adjust the number of printed errors
"""


BETWEEN = "tests/a.py::b ========= Error: x\n========= in a.py\nPASSED [ 50%]\ntests/a.py::c PASSED [100%]\n"
TWO = "tests/a.py::b[1, 2] PASSED [ 50%]\ntests/a.py::c SKIPPED (no GPU) [100%]\n"


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (0, TWO + "========= ERROR SUMMARY: 0 errors\n", "clean"),
        (0, TWO + "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", "clean"),
        (1, TWO + RACE, "1 reports: layer_norm_fwd_registers"),
        (1, TEMPLATE, "6 reports: at::native::reduce_kernel"),
        (1, TWO + READ, "120832 reports: look_at"),
        (1, BETWEEN + RACE, "1 reports: layer_norm_fwd_registers"),
        (1, "tests/a.py::b FAILED [ 50%]\ntests/a.py::c PASSED [100%]\n========= ERROR SUMMARY: 0 errors\n", "1 tests failed"),
        (4, "========= ERROR SUMMARY: 0 errors\n", "ended with 4; 0 of 2 tests over"),
        (-11, "tests/a.py::b PASSED [ 50%]\nSegmentation fault", "ended with -11 before its summary; 1 of 2 tests over"),
        (None, "tests/a.py::b PASSED [ 50%]\ntests/a.py::c ", "1 of 2 tests over"),
        (None, RACE.rpartition("===")[0], "1 reports: layer_norm_fwd_registers; 0 of 2 tests over"),
    ],
)  # fmt: skip
def test_what_was_named(sanitize: ModuleType, status: int | None, text: str, said: str) -> None:
    assert sanitize.together([sanitize.ended(status, text, 2)]) == said


def test_parts_of_a_file_together(sanitize: ModuleType) -> None:
    parts = [
        sanitize.ended(1, TWO + RACE, 2),
        sanitize.ended(None, "", 2),
        sanitize.ended(1, TWO + READ, 2),
    ]
    said = "120833 reports: layer_norm_fwd_registers, look_at; 4 of 6 tests over"
    assert sanitize.together(parts) == said


@pytest.mark.parametrize(("tests", "most"), [(0, 3), (1, 3), (3, 3), (7, 3), (100, 24)])
def test_shares_are_of_all_of_a_file(sanitize: ModuleType, tests: int, most: int) -> None:
    got = sanitize.shares(list(range(tests)), most)
    assert sorted(x for share in got for x in share) == list(range(tests))
    assert all(0 < len(share) <= most for share in got)
    assert all(max(share) - min(share) >= tests - 2 * len(got) + 1 for share in got)


def test_every_file_is_begun_before_the_second_share_of_any(sanitize: ModuleType) -> None:
    turns = list(sanitize._in_turns({"a": ["1", "2", "3"], "b": [], "c": ["4"]}, 2))
    assert turns == [(0, "a", ["1", "3"]), (0, "c", ["4"]), (1, "a", ["2"])]


def test_all_kernel_tests_are_run(sanitize: ModuleType) -> None:
    names = {sanitize.name_of(path) for path in sanitize.kernel_tests()}
    taken = (
        "test_row_kernels",
        "norm/test_batch_norm",
        "softmax/test_ragged",
        "reduce/test_ragged",
    )
    assert {f"kernels/{name}" for name in taken} <= names
    assert not {n for n in names if n.endswith("_compile") or "/cpu/" in n}
    apart = {f"kernels/{name}" for name in sanitize.APART}
    assert not apart & names
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in apart | names)


def test_files_of_the_same_name_keep_their_tests(
    sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        ROOT / "tests" / "kernels" / folder / "test_ragged.py" for folder in ("softmax", "reduce")
    ]
    listed = "".join(f"{path.relative_to(path.parents[1])}::test_a\n" for path in files)
    monkeypatch.setattr(
        sanitize.subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 0, listed, "")
    )
    assert sanitize.collected([str(path) for path in files], "") == {
        f"kernels/{path.parent.name}/test_ragged": [f"{path}::test_a"] for path in files
    }


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer that names something in test files called bad, and does not end in slow ones."""
    if sys.platform == "win32":
        pytest.skip("the stand-in is a script of the shell")
    path = tmp_path / "compute-sanitizer"
    path.write_text(
        '#!/bin/sh\nfor a; do case $a in *::*) tests="$tests $a";; esac; done\n'
        'case "$*" in\n*slow*) : > ${0%/*}/begun-$$\necho "========= Error: x\n=========     at kernel_of_$2+0x1"; sleep 60; exit 0;;\n'
        "*bad*) echo '=========     at kernel_of_ours+0x10 in a.py:1'; echo '========= ERROR SUMMARY: 2 errors'; status=1;;\n"
        "*) echo '========= ERROR SUMMARY: 0 errors';;\nesac\n"
        'for a in $tests; do echo "$a PASSED [ 10%]"; done; exit ${status:-0}\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


@pytest.mark.slow
def test_a_table_of_what_each_tool_named(
    sanitize: ModuleType, tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tool / f"test_{name}.py" for name in ("good", "bad", "slow")]
    for path in files:
        path.write_text("def test_a(): ...\n\n\ndef test_b(): ...\n")
    kept, reports = tool / "table.txt", tool / "reports"
    given = [*map(str, files), "--tools", "memcheck", "initcheck", "--tests", "1", "--seconds", "6"]
    given += ["--processes", "12", "--table", str(kept), "--reports", str(reports)]
    assert sanitize.main(given) == 1
    rows = [line.split(None, 1) for line in kept.read_text().splitlines()[1:]]
    assert [name for name, _ in rows] == ["test_bad", "test_good", "test_slow"]
    assert rows[0][1].count("4 reports: kernel_of_ours") == 2  # two processes of a test each
    assert rows[1][1].split() == ["clean", "clean"]
    for name in ("memcheck", "initcheck"):  # what a run had named before it was cut
        assert f"2 reports: kernel_of_{name}; 0 of 2 tests over" in rows[2][1]
        rest = (reports / f"rest-{name}.txt").read_text().splitlines()
        assert sorted(test.partition("::")[2] for test in rest) == ["test_a", "test_b"]
        assert all("test_slow" in test for test in rest)
        assert "kernel_of_ours" in (reports / f"{name}-test_bad-1.txt").read_text()
    assert not list(reports.glob("*good*"))
    assert sanitize.main([str(files[0]), "--tools", "memcheck"]) == 0
    assert "clean" in capsys.readouterr().out
    asked = tool / "asked.txt"
    asked.write_text(f"{files[0]}::test_b\n")
    assert sanitize.main([f"@{asked}", "--tools", "memcheck"]) == 0
    assert "  1 tests  clean" in capsys.readouterr().out


def test_a_tool_that_does_not_find_its_process_is_begun_again(
    sanitize: ModuleType, tool: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tool / "test_good.py"
    path.write_text("def test_a(): ...\n")
    script = tool / "compute-sanitizer"
    body = script.read_text().partition("\n")[2]
    lost = (
        "echo '========= Error: No attachable process found. compute-sanitizer timed-out.'; exit 1"
    )
    script.write_text(f"#!/bin/sh\nmkdir ${{0%/*}}/once 2>/dev/null && {{ {lost}; }}\n{body}")
    assert sanitize.main([str(path), "--tools", "racecheck"]) == 0
    assert "clean" in capsys.readouterr().out
    script.write_text(f"#!/bin/sh\n{lost}\n")
    assert sanitize.main([str(path), "--tools", "racecheck"]) == 1
    assert "ended with 1 before its summary; 0 of 1 tests over" in capsys.readouterr().out


def test_processes_share_nothing(sanitize: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    three = list(sanitize.places(3, 20000))
    assert [place.device for place in three] == ["4", "6", "4"]
    assert [place.workers for place in three] == [2, 2, 2]
    taken = [port for place in three for port in range(place.port, place.port + sanitize.PORTS)]
    assert len(set(taken)) == len(taken)


def test_what_was_not_begun_is_left_for_the_next_run(sanitize: ModuleType, tool: Path) -> None:
    path, reports = tool / "test_good.py", tool / "reports"
    path.write_text("def test_a(): ...\n\n\ndef test_b(): ...\n")
    given = [str(path), "--tools", "racecheck", "--tests", "1", "--reports", str(reports)]
    assert sanitize.main([*given, "--seconds", "0"]) == 1
    rest = reports / "rest-racecheck.txt"
    assert len(rest.read_text().splitlines()) == 2
    assert sanitize.main([f"@{rest}", "--tools", "racecheck"]) == 0


def test_tests_that_cannot_be_collected_are_shown(sanitize: ModuleType, tool: Path) -> None:
    path = tool / "test_broken.py"
    path.write_text("import absent_module\n")
    with pytest.raises(SystemExit, match="absent_module"):
        sanitize.main([str(path)])


@pytest.mark.slow
def test_an_interrupt_ends_what_runs(tool: Path) -> None:
    slow = tool / "test_slow.py"
    slow.write_text("".join(f"def test_{x}(): ...\n\n\n" for x in "abc"))
    command = [sys.executable, str(ROOT / "tools" / "sanitize.py"), str(slow)]
    command += ["--tools", "racecheck", "--processes", "3", "--tests", "1"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which programs in the background ignore
    )  # fmt: skip
    until = time.monotonic() + 120
    while len(begun := list(tool.glob("begun-*"))) < 3 and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=50)
    assert "interrupted" in said
    assert process.returncode == 130
    assert len(begun) == 3
    for path in begun:
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.name.removeprefix("begun-")), 0)


def test_what_begins_as_an_interrupt_comes_is_ended(sanitize: ModuleType) -> None:
    sanitize.interrupted.set()
    begin = time.monotonic()
    status, _ = sanitize.printed(["sleep", "60"], os.environ, begin + 60)
    assert (status, sanitize.running) == (-signal.SIGKILL, set())
    assert time.monotonic() - begin < 50


def test_what_is_missing_is_named(
    sanitize: ModuleType, tool: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    with pytest.raises(SystemExit):
        sanitize.main([str(tool / "absent.py")])
    assert "no such test files" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        sanitize.main(["--tests", "0"])
    assert "--tests 0" in capsys.readouterr().err
    monkeypatch.setenv("PATH", str(tool / "none"))
    with pytest.raises(SystemExit):
        sanitize.main([])
    assert "compute-sanitizer is not on the PATH" in capsys.readouterr().err
