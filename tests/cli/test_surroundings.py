"""The command line where the environment is not as usual: lockfiles, settings and terminals that do not fit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tensorlogic.bench import precision_suite, session
from tensorlogic.cli import doctor, doctor_cpu, exit_codes, main
from tensorlogic.core import policy
from tensorlogic.plans import file_format
from tensorlogic.system import atomic_file, settings

ONE = ["--size", "64", "--dtype", "f32", "--device", "cpu"]


@pytest.fixture
def lockfile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """With the plan of add_relu at 64."""
    path = tmp_path / "lock.json"
    assert main.main(["tune", "--op", "add_relu", *ONE]) == 0
    assert main.main(["plans", "export", str(path), "--device", "cpu"]) == 0
    capsys.readouterr()
    return path


def test_commands_that_measure_do_so_beside_a_lockfile_of_the_environment(
    lockfile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with policy.use(replace(policy.ROOT, lockfile=lockfile, entries={})):
        assert main.main(["tune", "--op", "mul_relu", *ONE]) == 0
        assert "1 keys measured" in capsys.readouterr().out
        assert main.main(["explain", "add_relu", *ONE]) == 0
        assert "(from: lockfile)" in capsys.readouterr().out
        assert main.main(["explain", "mul_relu", *ONE]) == 0  # measured, and not locked
        said = capsys.readouterr().out
    assert "chosen: torch.eager" in said
    assert " us" in said


@pytest.mark.slow
def test_bench_measures_beside_a_lockfile_of_the_environment(
    lockfile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["bench", "--quick", "--op", "mul_relu", *ONE, "--json", str(tmp_path / "a.json")]
    with policy.use(replace(policy.ROOT, lockfile=lockfile, entries={})):
        assert main.main(tokens) == 0
    assert "not timed" not in capsys.readouterr().out


def test_an_unusable_lockfile_is_said_not_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lock.json"
    monkeypatch.setenv("TENSORLOGIC_LOCKFILE", str(path))
    monkeypatch.setattr(doctor_cpu, "compared", lambda: iter(()))
    with policy.use(policy.Policy(settings.tune_mode(), lockfile=settings.lockfile())):
        assert main.main(["explain", "add_relu", *ONE, "--no-measure"]) == 2
        assert "does not exist" in capsys.readouterr().err
        found = {f.about: f for f in doctor.examine()}["TENSORLOGIC_LOCKFILE"]
        assert (found.state, "does not exist" in found.found) == ("broken", True)
        path.write_text("{}")
        assert main.main(["doctor"]) == 1
    assert "not a plan file" in capsys.readouterr().out


def test_doctor_compares_beside_a_lockfile(lockfile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(doctor_cpu, "_pair", lambda *_: seen.append(policy.current().lockfile))
    with policy.use(replace(policy.ROOT, lockfile=lockfile, entries={})):
        next(doctor_cpu.compared())
    assert seen == [None]


@pytest.mark.slow
def test_a_terminal_without_our_signs_shows_others() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tensorlogic", "explain", "add_relu", *ONE],
        capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "?" in done.stdout


@pytest.mark.slow
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
        capture_output=True, text=True, timeout=240, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def run(*tokens: str, tail: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    command = f"exec {sys.executable} -m tensorlogic {' '.join(tokens)} {tail}"
    return subprocess.run(
        command, shell=True, capture_output=True, text=True, timeout=120, env=os.environ | env
    )


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("tokens", [["--help"], ["plans", "list"]])
def test_output_that_cannot_be_written_is_said(tokens: list[str]) -> None:
    done = run(*tokens, tail=">/dev/full")
    assert done.returncode == exit_codes.REFUSED
    assert (
        done.stderr == "tensorlogic: the output cannot be written: No space left on device\n"
    )  # nor does the flush at exit fail


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_commands_run_without_streams() -> None:
    assert run("plans", "list", tail=">&-").returncode == 0
    assert run("explain", "nothing", tail="2>&-").returncode == exit_codes.REFUSED


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (["plans", "verify", "a.json", "--margin", "nan"], "margin is nan"),
        (["try", "--margin", "inf", "a.py"], "margin is inf"),
        (["try", "--seconds", "-1", "a.py"], "seconds is -1.0"),
        (["bench", "--op", ""], "'' names nothing"),
        (["tune", "--size", ","], "',' names nothing"),
        (["explain", "linear", "--size", "99999999"], "the inputs of linear cannot be made"),
        (["explain", "linear", "--size", "9" * 5000], "a whole number from 1"),
        (["explain", "linear", "--shape", "9" * 30, "--shape", "3x3"], "sizes such as 16x768"),
        (["plans", "verify", "."], "lockfile . is no file"),
        (["plans", "list", "--op", "typo"], "op is 'typo'; one of these operations or categories"),
        (["plans", "export", "a.json", "--op", "typo"], "op is 'typo'; one of these operations"),
        (["bench", "--suite", "precision", "--device", "nosuch"], "device is 'nosuch'; cpu, cuda"),
        (["bench", "--quick", "--json", "a.html", "--report"], "ends in .json"),
        (["bench", "--json", ".", "--report"], "would replace the result file ."),
    ],
)
def test_requests_that_cannot_be_served(
    tokens: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(tokens) == exit_codes.REFUSED
    assert said in capsys.readouterr().err


def test_files_that_are_no_plain_files(tmp_path: Path) -> None:
    """A link stays a link; a pipe is written to, not replaced; what cannot be written leaves nothing behind."""
    real, link, pipe = (tmp_path / n for n in ("real", "link", "pipe"))
    real.write_text("old")
    link.symlink_to(real)
    atomic_file.replace(link, "new")
    assert link.is_symlink()
    assert real.read_text() == "new"
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    atomic_file.replace(pipe, "said")
    assert os.read(end, 9) == b"said"
    os.close(end)
    assert pipe.is_fifo()
    with pytest.raises(IsADirectoryError):
        atomic_file.replace(tmp_path, "text")
    with pytest.raises(FileExistsError):
        atomic_file.replace(real / "below", "text")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "pipe", "real"]


@pytest.mark.slow
def test_a_store_that_cannot_be_written_is_said(
    lockfile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is a file, or its disk is full: what is imported or measured there would be lost."""
    file = tmp_path / "file"
    file.touch()
    found = run("plans", "import", str(lockfile), TENSORLOGIC_CACHE_DIR=str(file))
    assert found.returncode == exit_codes.REFUSED, found.stdout
    assert f"tensorlogic: the plan store {file}" in found.stderr
    assert doctor._unwritable(file) == "Not a directory"
    assert doctor._unwritable(tmp_path / "none") == "No such file or directory"
    assert doctor._unwritable(tmp_path) is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "file", "lock.json"]


@pytest.mark.slow
def test_an_interrupt_that_python_drops_is_heard() -> None:
    """In a finalizer or a weak reference's callback a KeyboardInterrupt is printed and forgotten."""
    program = """
import signal, time, weakref
from tensorlogic.cli import exit_codes as exits
class Dropped: pass
class Falls:
    def __del__(self): signal.raise_signal(signal.SIGINT)
def finalizer():
    Falls()
    for _ in range(500): time.sleep(0.01)
def callback():
    thing = Dropped()
    seen = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGINT))
    del thing
    for _ in range(500): time.sleep(0.01)
signal.signal(signal.SIGINT, signal.default_int_handler)
print(exits.ended(finalizer), exits.ended(callback))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == (
        f"{exit_codes.INTERRUPTED} {exit_codes.INTERRUPTED}\n",
        "tensorlogic: interrupted\n" * 2,
    )


WRONG = [("TUNE", "bogus"), ("ENABLE", "yes"), ("CACHE_DIR", "~nosuch/x"), ("INDUCTOR", "no")]


@pytest.mark.parametrize(("variable", "value"), WRONG)
def test_a_variable_that_cannot_be_read_is_said(
    variable: str,
    value: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(f"TENSORLOGIC_{variable}", value)
    assert main.main(["plans", "list"]) == exit_codes.REFUSED
    said = f"TENSORLOGIC_{variable} is {value!r}; "
    assert capsys.readouterr().err.startswith(f"tensorlogic: {said}")
    assert main.main(["doctor"]) == exit_codes.FOUND
    assert f"broken  TENSORLOGIC_{variable}" in (out := capsys.readouterr().out)
    assert said in out
    assert main.main(["bench", "--help"]) == exit_codes.DONE


STARTUP = Path(main.__file__).parents[1] / "tools" / "startup"
COMMAND = f"import sys; sys.path.insert(0, {str(STARTUP)!r}); import _tensorlogic_cli as c; sys.argv[1:] = ['doctor']; sys.exit(c.main())"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("start", "code", "out"),
    [
        (["-m", "tensorlogic", "plans", "list"], exit_codes.REFUSED, ""),
        (["-m", "tensorlogic", "doctor"], exit_codes.FOUND, "broken  TENSORLOGIC_ENABLE"),
        (["-m", "tensorlogic", "plans", "--help"], exit_codes.DONE, "Usage"),
        (["-c", COMMAND], exit_codes.FOUND, "broken  TENSORLOGIC_ENABLE"),
    ],
)
def test_a_variable_that_forbids_the_import_is_said(start: list[str], code: int, out: str) -> None:
    if start[0] == "-c" and not STARTUP.exists():
        pytest.skip("not a checkout")
    env = os.environ | {"TENSORLOGIC_ENABLE": "yes"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *start], capture_output=True, text=True, env=env
    )
    assert (done.returncode, out in done.stdout) == (code, True), done.stderr
    assert done.stderr.count("\n") == (code == exit_codes.REFUSED)


def test_the_suite_precision_measures_the_device_that_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[list[torch.device]] = []
    monkeypatch.setattr(precision_suite, "run", lambda devices, *_: asked.append(devices))
    monkeypatch.setattr(precision_suite, "write", lambda *_: None)
    monkeypatch.setattr(precision_suite, "table", lambda _: "")
    monkeypatch.setattr(session, "pick_device", torch.device)
    tokens = ["bench", "--suite", "precision", "--json", str(tmp_path / "a.json"), "--device"]
    assert [main.main([*tokens, d]) for d in ("cuda:1", "cpu", "mps")] == [0, 0, exit_codes.REFUSED]
    assert asked == [[torch.device("cuda", 1)], [torch.device("cpu")]]


def test_an_optional_tensor_is_left_out_by_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [part for shape in ("16x8", "4x8", "-", "16x4") for part in ("--shape", shape)]
    tokens = ["explain", "linear", *shapes, "--dtype", "f32", "--device", "cpu", "--no-measure"]
    assert main.main(tokens) == 0
    assert "residual=f32[16,4]" in capsys.readouterr().out


def test_a_reader_that_goes_while_rich_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """Its consoles make of a broken pipe an exit with 1."""

    def printing() -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1)  # noqa: B904  # as rich does

    stdout = os.dup(1)
    try:
        assert exit_codes.ended(printing) == exit_codes.UNREAD
        with pytest.raises(SystemExit):
            exit_codes.ended(lambda: sys.exit(1))
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def test_choices_that_a_full_disk_does_not_take_are_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_format, "rewrite", full)
    with pytest.warns(file_format.PlanStoreWarning):
        assert main.main(["tune", "--op", "add_relu", *ONE]) == exit_codes.REFUSED
    out, err = capsys.readouterr()
    assert "1 keys measured" in out
    assert "the choices were not remembered" in err


def test_plans_are_named_as_in_the_benchmark(
    lockfile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(["tune", "--op", "linear_residual_relu", *ONE]) == 0
    capsys.readouterr()
    for names, count in (
        ("fusion", 2), ("linear_residual_relu", 1), ("add_relu", 1), ("matmul", 0), ("softmax", 0), ("linear_backward", 0),
    ):  # fmt: skip
        assert main.main(["plans", "list", "--op", names, "--device", "cpu"]) == 0
        assert f"{count} plans in" in capsys.readouterr().out
    path = str(tmp_path / "b.json")
    assert main.main(["plans", "export", path, "--op", "fusion", "--device", "cpu"]) == 0
    assert "2 plans written" in capsys.readouterr().out
