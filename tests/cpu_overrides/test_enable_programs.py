"""Programs that are enabled from outside, by a variable or before anything else is imported, and processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tensorlogic.native import hook_ops as native_hook_ops

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_policies_in_force_before_the_hooks_are_loaded_are_counted() -> None:
    if native_hook_ops.available() is not None:
        pytest.skip(str(native_hook_ops.available()))
    program = (
        "import ctypes, tensorlogic\nfrom tensorlogic.native import hook_ops, cpu_library as native\n"
        "def seen(): return ctypes.c_int64.from_address(hook_ops.op('policies_at')()).value\n"
        "with tensorlogic.policy(tune='off'):\n    native.available(); print(seen())\n"
        "print(hook_ops.available(), seen())\n"
        "with tensorlogic.policy(tune='off'): print(seen())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["1", "None", "0", "1"], "")


# Runs a script as an interpreter does into whose site-packages a wheel has put the files of tools/startup.
LAUNCH = "import runpy, site, sys; site.addsitedir(sys.argv[1]); sys.argv = sys.argv[2:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def launch(script: Path, *arguments: str, enable: str | None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "TENSORLOGIC_ENABLE"}
    environment["PYTHONPATH"] = str(ROOT)
    if enable is not None:
        environment["TENSORLOGIC_ENABLE"] = enable
    return subprocess.run(
        [sys.executable, "-c", LAUNCH, str(ROOT / "tools" / "startup"), str(script), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=200,
        check=False,
    )


@pytest.mark.slow
def test_an_unmodified_script_gives_the_same_answers() -> None:
    small = ("--width", "64", "--layers", "1", "--length", "16", "--batches", "4", "--seconds", "0")
    script = ROOT / "examples" / "half_transformer.py"
    assert "tensorlogic" not in "".join(
        line for line in script.read_text().splitlines() if "import" in line
    )
    answers = []
    for enable in ("0", "1"):
        done = launch(script, *small, enable=enable)
        assert (done.returncode, done.stderr) == (0, "")
        answers.append([line for line in done.stdout.splitlines() if " ms" not in line])
    numbers = [[float(w) for w in " ".join(a).split() if w[0].isdigit()] for a in answers]
    assert numbers[0] == pytest.approx(numbers[1], rel=5e-3)
    assert len(numbers[0]) == 8


STARTS = {  # variable -> what a script sees after importing torch, and that nothing was imported before
    None: "False False",
    "0": "False False",
    "1": "False True",
}


@pytest.mark.slow
@pytest.mark.parametrize("value", STARTS)
def test_the_variable_reaches_programs_that_do_not_import_us(
    value: str | None, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nbefore = 'torch' in sys.modules or 'tensorlogic' in sys.modules\n"
        "import torch\nours = sys.modules.get('tensorlogic')\n"
        "print(before, ours is not None and ours.cpu_overrides.enable.enabled())\n"
    )
    done = launch(script, enable=value)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, STARTS[value], "")


@pytest.mark.slow
def test_importing_us_first_enables_too_and_nonsense_is_said(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import tensorlogic\nprint(tensorlogic.cpu_overrides.enable.enabled())\n")
    done = launch(script, enable="1")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "True", "")
    script.write_text("import torch\nprint('on')\n")
    done = launch(script, enable="please")
    assert (done.returncode, done.stdout.strip()) == (0, "on")
    assert "TENSORLOGIC_ENABLE is 'please'; it must be 0, 1 or pool" in done.stderr


def test_a_failed_import_of_torch_may_be_tried_again(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os\nif not os.environ.pop('FAILED', None):\n"
        "    os.environ['FAILED'] = '1'\n    raise ImportError('first')\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nsys.path.insert(0, sys.path[0])\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "import warnings\nwarnings.simplefilter('error')\n"
        "try:\n    import torch\nexcept ImportError as e:\n    print(e)\n"
        "try:\n    import torch\nexcept Warning as e:\n    print('told')\n"
    )
    done = launch(script, enable="1")
    assert done.stdout.split() == ["first", "told"], done.stderr


@pytest.mark.slow
def test_the_benchmark_compares_answers() -> None:
    small = ["--width", "64", "--layers", "1", "--length", "8", "--batches", "1", "--seconds", "0"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "enable.py"), *small],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "answers the same" in done.stdout
    assert re.search(r"\| training step, batch 1 \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", done.stdout)
