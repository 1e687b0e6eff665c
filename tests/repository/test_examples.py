"""The examples do what they say: one run of each, as a user starts it, and the parts that a run does not show."""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import tensorlogic

EXAMPLES = Path(__file__).parents[2] / "examples"
MOST_CPU_S = 60.0  # of processor time; it takes about 10


@pytest.fixture(scope="module")
def digits() -> ModuleType:
    """examples/digits.py as a module."""
    spec = importlib.util.spec_from_file_location("digits_example", EXAMPLES / "digits.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, float]:
    """What `python examples/digits.py` prints, and the processor time it takes."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["TENSORLOGIC_CACHE_DIR"] = str(tmp_path_factory.mktemp("cache"))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "digits.py")],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    return done.stdout, after.ru_utime - before.ru_utime


def test_digits_reaches_its_accuracy_in_half_precision(printed: tuple[str, float]) -> None:
    found = dict(
        re.findall(r"^(\w+), float\d+ +test accuracy ([\d.]+) %", printed[0], re.MULTILINE)
    )
    ours, theirs = float(found["TensorLogic"]), float(found["PyTorch"])
    assert ours >= 97.0
    assert theirs >= 97.0
    assert abs(ours - theirs) <= 1.0


def test_digits_prints_times_and_takes_little(printed: tuple[str, float]) -> None:
    assert len(re.findall(r"[\d.]+ s$", printed[0], re.MULTILINE)) == 2
    assert "could not be measured" not in printed[0]
    assert printed[1] < MOST_CPU_S


@pytest.mark.parametrize("training", [False, True])
def test_digits_both_networks_are_the_same(
    digits: ModuleType, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digits, "DROP", 0.0)
    ours, theirs = (digits.Copies(torch.float64).leaves for _ in "12")
    for name, t in theirs.items():
        value = (t.detach().double() + 0.1 * torch.rand(t.shape)).abs()
        for w in (ours, theirs):
            w[name] = value.clone().requires_grad_(t.requires_grad)
    x, y = torch.rand(20, 64, dtype=torch.float64), torch.randint(10, (20,))
    with tensorlogic.policy(force="torch.eager"):
        loss = tensorlogic.softmax_cross_entropy(digits.fused(ours, x, training), y)
    expected = F.cross_entropy(digits.plain(theirs, x, training), y)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name])  # running statistics too
        torch.testing.assert_close(ours[name].grad, theirs[name].grad, atol=1e-9, rtol=1e-6)


def test_digits_computes_in_half_and_keeps_float32_masters(digits: ModuleType) -> None:
    copies = digits.Copies(torch.float16)
    assert {t.dtype for t in copies.masters.values()} == {torch.float32}
    assert {t.dtype for n, t in copies.leaves.items() if n.endswith((".w", ".b"))} == {
        torch.float16
    }
    x = torch.rand(8, 64, dtype=torch.float16)
    logits = digits.fused(copies.leaves, x, True)
    assert logits.dtype == torch.float16
    logits.float().square().mean().backward()
    copies.take_gradients(2.0)
    assert all(t.grad.dtype == torch.float32 for t in copies.masters.values())
    with torch.no_grad():
        copies.masters["stem.w"] += 1e-5  # too small a step for a half near 1, kept by the master
    copies.give_weights()
    assert torch.equal(copies.leaves["stem.w"], copies.masters["stem.w"].half())


def test_digits_shifts_by_one_pixel_at_most(digits: ModuleType) -> None:
    x = torch.zeros(200, 8, 8)
    x[:, 4, 4] = 1.0
    moved = digits.shifted(x.flatten(1), torch.Generator().manual_seed(0)).view(200, 8, 8)
    places = {tuple(p) for p in moved.nonzero()[:, 1:].tolist()}
    assert places == {(r, c) for r in (3, 4, 5) for c in (3, 4, 5)}
    assert moved.sum() == 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("resnet.py", ["--size", "32"]),
        ("transformer.py", ["--layers", "1", "--width", "64"]),
        ("train.py", ["--steps", "3"]),
    ],
)
def test_whole_models_say_before_and_after(name: str, options: list[str], tmp_path: Path) -> None:
    env = os.environ | {"TENSORLOGIC_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *options],
        env=env,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "before" in done.stdout
    if name == "train.py":
        losses = [float(v) for v in re.findall(r"loss ([\d.]+)", done.stdout)]
        assert losses[1] == pytest.approx(losses[0], rel=0.02)
    else:
        difference = float(re.findall(r"difference from eager ([\d.e+-]+)", done.stdout)[0])
        assert difference < 2e-3
