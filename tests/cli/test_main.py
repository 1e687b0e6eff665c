"""The command line as a person meets it: commands, exit codes, help, doctor."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tensorlogic
from tensorlogic.bench import measure_case, result_file
from tensorlogic.bench.result_file import Ceilings
from tensorlogic.cli import doctor, doctor_cpu, exit_codes, main
from tensorlogic.core import op as core_op
from tensorlogic.cpu_overrides import enable, overrides

PACKAGE = Path(tensorlogic.__file__).parent
ALONE = """
import sys, types
package = types.ModuleType("tensorlogic")
package.__path__ = [{path!r}]
sys.modules["tensorlogic"] = package
from tensorlogic.cli.main import main
code = main({tokens!r})
assert "torch" not in sys.modules, "help imports PyTorch"
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_case, "QUICK", measure_case.Effort(5, 0.005))
    monkeypatch.setattr(
        "tensorlogic.bench.machine_limits.find",
        lambda *_: Ceilings([(8192, 1.0)], {"f32": 1.0}, {"torch": 1.0}),
    )


@pytest.mark.parametrize("tokens", [["--help"], ["bench", "--help"], ["plans", "verify", "--help"]])
def test_help_does_not_import_torch(tokens: list[str]) -> None:
    code = ALONE.format(path=str(PACKAGE), tokens=tokens)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "Usage: tensorlogic" in done.stdout


STARTUP = PACKAGE.parent / "tools" / "startup"
ENTRY = """
import sys
sys.path.insert(0, {startup!r})
sys.argv = ["tensorlogic", *{tokens!r}]
{before}
import _tensorlogic_cli
code = _tensorlogic_cli.main()
assert ("torch" in sys.modules) is {torch}, "PyTorch"
sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.skipif(not STARTUP.exists(), reason="not a checkout")
@pytest.mark.parametrize(
    ("tokens", "torch", "code", "said", "before"),
    [
        ([], False, 0, "Usage: tensorlogic", ""),
        (["--version"], False, 0, ".", ""),
        (["report", "--help"], False, 0, "RESULTS", ""),
        (["try", "-h"], False, 0, "SCRIPT", ""),
        (["compare", "a.json", "b.json"], True, 2, "does not exist", ""),
        (["bench"], True, 2, "tensorlogic-engine[bench]", "sys.modules['cyclopts'] = None"),
    ],
)
def test_the_installed_command(
    tokens: list[str], torch: bool, code: int, said: str, before: str
) -> None:
    """Help needs no PyTorch; what is missing is named."""
    text = ENTRY.format(startup=str(STARTUP), tokens=tokens, torch=torch, before=before)
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=PACKAGE.parent)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.skipif(not STARTUP.exists() or os.name == "nt", reason="not a checkout, or no signals")
def test_an_interrupt_while_pytorch_is_imported_ends_the_command_without_a_word() -> None:
    before = """
import os, signal, sys
class Interrupted:
    def find_spec(self, name, *_):
        if name == "torch.nn":
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
"""
    text = ENTRY.format(startup=str(STARTUP), tokens=["plans", "list"], torch=True, before=before)
    done = subprocess.run(
        [sys.executable, "-c", text],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=PACKAGE.parent,
    )
    assert done.returncode == -signal.SIGINT
    assert done.stderr == ""


@pytest.mark.slow
def test_importing_loads_only_what_every_program_needs() -> None:
    """Each of these took milliseconds; `gc` collects as before."""
    text = """
import gc, sys, torch
before = set(sys.modules)
import tensorlogic
late = {"filelock", "platformdirs", "html", "statistics", "tensorlogic.compiler", "tensorlogic.bench", "rich", "matplotlib", "torch._dynamo"}
late |= {"tensorlogic.dispatch.explain", "tensorlogic.autotune.tune", "tensorlogic.memory.pool"}
assert not late & (set(sys.modules) - before), late & set(sys.modules)
for key in ("CPU", "CUDA", "AutogradCPU"):  # what C++ finds without asking Python: AOTInductor's packages, scripted modules
    assert torch._C._dispatch_has_computed_kernel_for_dispatch_key("tensorlogic::linear", key), key
assert gc.isenabled()
later = ("optimize", "capture", "explain", "candidates", "tune")
assert all(callable(getattr(tensorlogic, name)) for name in later)
assert {*later, "pool"} <= set(dir(tensorlogic))
assert tensorlogic.pool.stats().bytes_held >= 0
from tensorlogic import *
assert optimize is tensorlogic.optimize
try:
    tensorlogic.absent
except AttributeError as problem:
    assert "no attribute 'absent'" in str(problem)
"""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True, timeout=240, env=env
    )
    assert done.returncode == 0, done.stderr


def test_bench_and_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.json"
    tokens = [
        "bench",
        "--quick",
        "--op",
        "add,mul",
        "--size",
        "64",
        "--dtype",
        "f32",
        "--device",
        "cpu",
        "--json",
        str(path),
    ]
    assert main.main(tokens) == 0
    out = capsys.readouterr().out
    assert "x eager" in out
    assert f"result file: {path}" in out.replace("\n", "") or str(path) in out
    assert main.main(["compare", str(path), str(path)]) == 0
    assert "2 unchanged" in capsys.readouterr().out
    _times(
        path, lambda values: [statistics.median(values)] * len(values)
    )  # whatever else runs here
    slower = tmp_path / "b.json"
    slower.write_text(path.read_text())
    _times(slower, lambda values: [20 * v for v in values], (result_file.OURS,))
    assert main.main(["compare", str(path), str(slower)]) == 1
    assert "2 worse" in capsys.readouterr().out
    assert main.main(["compare", str(path), str(slower), "--margin", "99"]) == 0


def _times(
    path: Path, changed: Callable[[list[float]], list[float]], names: tuple[str, ...] = ()
) -> None:
    found = result_file.load(path)
    for row in found.rows:
        for name in names or tuple(row.device_us):
            row.device_us[name] = changed(row.device_us[name])
    found.write(path)


def test_interrupted_bench_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure_case, "measured", stop)
    path = tmp_path / "a.json"
    assert (
        main.main(
            [
                "bench",
                "--quick",
                "--op",
                "add",
                "--size",
                "64",
                "--device",
                "cpu",
                "--json",
                str(path),
            ]
        )
        == 130
    )
    assert "not complete" in capsys.readouterr().out
    assert path.exists()


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        (["bench", "--op", "linaer"], "op is 'linaer'"),
        (["bench", "--size", "many"], "size is 'many'"),
        (["bench", "--device", "tpu"], "device is 'tpu'"),
        (["compare", "missing.json", "missing.json"], "does not exist"),
        (["explain", "linear", "--shape", "3x4", "--shape", "5x6"], "its last dimension must be 6"),
        (["explain", "linear", "--flag", "activation"], "name=value is required"),
        (["plans", "verify", "missing.json"], "missing.json does not exist"),
        (["plans", "export", "lock.json", "--device", "cpu"], "no plans to export"),
    ],
)
def test_requests_that_cannot_be_served(
    tokens: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.main(tokens) == 2
    assert reason in capsys.readouterr().err


def test_unknown_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bogus"]) == 2
    assert main.main(["bench", "--bogus"]) == 2
    assert main.main(["--version"]) == 0
    assert tensorlogic.__version__ in capsys.readouterr().out


def test_explain_measures_and_shows(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main.main(["explain", "add_relu", "--size", "32", "--dtype", "f32", "--device", "cpu"]) == 0
    )
    out = capsys.readouterr().out
    assert "add_relu inference a=f32[32,32] b=f32[32,32]" in out
    assert "(from: plan)" in out
    assert (
        main.main(
            [
                "explain",
                "add_relu",
                "--size",
                "48",
                "--dtype",
                "f32",
                "--device",
                "cpu",
                "--no-measure",
            ]
        )
        == 0
    )
    assert "(from: plan)" not in capsys.readouterr().out


def test_tune_then_plans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main.main(["tune", "--op", "add", "--size", "64", "--dtype", "f32", "--device", "cpu"]) == 0
    )
    head, line, _, said = capsys.readouterr().out.splitlines()
    assert said.startswith("1 keys measured")
    assert head.split() == ["candidate", "captured", "us", "PyTorch", "us", "x", "measured", "refused", "key"]  # fmt: skip
    told = re.fullmatch(
        r"(\S+)(?: +[a-z]\S+)? +([\d.]+) +([\d.]+) +([\d.]+) +\d+ +\d+  (add inference a=.*)", line
    )
    assert told
    ours, theirs, times = (float(told[i]) for i in (2, 3, 4))
    assert times == pytest.approx(theirs / ours, abs=0.2)
    assert main.main(["plans", "list", "--device", "cpu"]) == 0
    assert "add inference a=f32[64]" in capsys.readouterr().out
    lock = tmp_path / "lock.json"
    assert main.main(["plans", "export", str(lock), "--device", "cpu"]) == 0
    assert main.main(["plans", "verify", str(lock), "--margin", "5"]) == 0
    assert main.main(["plans", "import", str(lock), "--device", "cpu"]) == 0
    capsys.readouterr()
    lock.write_text(lock.read_text().replace("torch.eager", "torch.eeger"))
    assert main.main(["plans", "verify", str(lock)]) == 2
    assert "checksum" in capsys.readouterr().err


def test_doctor_names_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = main.main(["doctor"])
    out = capsys.readouterr().out
    assert "PyTorch" in out
    assert "plan store" in out
    assert code == int("broken" in out)


@pytest.mark.slow
def test_doctor_measures_what_pytorch_does_badly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_cpu, "BUDGET_S", 0.02)
    found = {f.about: f for f in doctor.examine()}
    product = found["float16 product 384x384x384"]
    times = re.fullmatch(
        r"PyTorch ([\d.]+) s, repaired ([\d.]+) s: ([\d.]+) times(?:, by \S+ \(.+\))?",
        product.found,
    )
    assert times is not None
    alone, repaired, gain = map(float, times.groups())
    assert gain == pytest.approx(alone / repaired, rel=0.1, abs=0.1)
    assert ("enable()" in product.cost) == (gain >= doctor_cpu.WORTH)
    if overrides.no_float16():
        assert gain > 3
    assert not enable.enabled()
    tensorlogic.enable()
    try:
        again = {f.about: f for f in doctor.examine()}
        assert enable.enabled()
        assert all(
            f.cost in ("", doctor_cpu.TUNE, doctor_cpu.GUARD)
            for name, f in again.items()
            if name.startswith("float16")
        )
    finally:
        tensorlogic.disable()


@pytest.mark.parametrize("on", [False, True])
def test_doctor_says_where_a_repair_is_slower(on: bool) -> None:
    def found(pytorch_s: float, enabled_s: float, least: float) -> doctor.Finding:
        c = doctor_cpu.Compared(
            "a product", pytorch_s, enabled_s, "enable it", least, "cpu.epilogue (cost model)"
        )
        return doctor._work(c, on)

    worse = found(1e-3, 1.2e-3, 1.15)
    assert (worse.state, worse.cost) == ("note", doctor_cpu.TUNE)
    assert "0.83 times, by cpu.epilogue (cost model)" in worse.found
    assert (
        found(1e-3, 1.2e-3, 0.98).state == "ok"
    )  # the interval reaches below: no difference shown
    slow = found(3e-3, 1e-3, 0.3)
    assert (slow.state, slow.cost) == (("ok", "") if on else ("note", "enable it"))


def test_doctor_names_a_rival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "importlib.metadata.packages_distributions",
        lambda: {"tensorlogic": ["tensorlogic", "tensorlogic-engine"]},
    )
    found = [f for f in doctor.examine() if f.about == "another tensorlogic"]
    assert [f.state for f in found] == ["broken"]
    assert "pip uninstall tensorlogic" in found[0].cost


def test_doctor_names_what_an_older_version_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files and libraries that a move left behind, and an installation of another folder than the imported one."""
    here = tmp_path / "tensorlogic"
    for name in (
        "__init__.py", "front.py", "libold.so", "__pycache__/gone.cpython-311.pyc", "program/__pycache__/a.pyc",
        "trying/look.py", "_native/libtensorlogic_native.so", "_native/libtensorlogic_hooks-2.13.0.so",
        "_native/tensorlogic_calls-2.13.0.so", "_native/libtl_cpu.so", "ops/linear/__init__.py",
    ):  # fmt: skip
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).touch()
    monkeypatch.setattr(doctor, "FOLDER", here)

    class Editable:
        def read_text(self, name: str) -> str:
            return json.dumps({"dir_info": {"editable": True}, "url": (tmp_path / "a b").as_uri()})

    monkeypatch.setattr(doctor, "installed", lambda name: "0.1.0")
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Editable())
    found = list(doctor._package())
    left = [f.found.split(" ")[0] for f in found if f.about == "a file left over"]
    assert left == [str(here / n) for n in ("_native/libtl_cpu.so", "front.py", "libold.so", "trying")]  # fmt: skip
    (moved,) = (f for f in found if f.about == "two folders")
    assert moved.found == f"the installed one is {tmp_path / 'a b' / 'tensorlogic'}, the imported one {here}"  # fmt: skip
    assert all(f.state in ("ok", "note") for f in found)
    (tmp_path / "a b").symlink_to(tmp_path)  # the same folder by another name
    assert not [f for f in doctor._package() if f.about == "two folders"]


def test_doctor_without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor.installed
    monkeypatch.setattr(
        doctor, "installed", lambda name: None if name == "torch" else version(name)
    )
    found = {f.about: f for f in doctor.examine()}
    assert found["PyTorch"].state == "broken"
    assert "pip install torch" in found["PyTorch"].cost


@pytest.mark.slow
def test_output_that_nobody_reads_to_its_end() -> None:
    """`tensorlogic ... | head` ends without a traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "tensorlogic", "plans", "list", "--device", "cpu"],
        stdout=writer, stderr=subprocess.PIPE, text=True, timeout=240, check=False,
    )  # fmt: skip
    os.close(writer)
    assert "Traceback" not in done.stderr
    assert done.returncode == exit_codes.UNREAD


def test_export_leaves_out_what_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = ["--op", "mul", "--size", "64", "--dtype", "f32", "--device", "cpu"]
    assert main.main(["tune", *tokens]) == 0
    lock = str(tmp_path / "lock.json")
    assert main.main(["plans", "export", lock, "--op", "mul", "--device", "cpu"]) == 0
    assert "left out" not in capsys.readouterr().out
    for candidate in core_op.OPS["mul"].candidates.values():
        monkeypatch.setitem(candidate.__dict__, "source", "other")
    assert main.main(["plans", "export", lock, "--op", "mul", "--device", "cpu"]) == 2
    assert "left out: what they chose has changed" in capsys.readouterr().out
