"""Every Metal shader on the stand-in, against float64: all strategies, dtypes, odd sizes, strides and outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tensorlogic.core.op import OPS
from tensorlogic.kernels.metal import launch as metal_launch

from ...support.metal import planted as metal_planted
from ...support.metal import standin as metal_standin
from ...support.metal import trials as metal_trials

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.skipif(metal_standin.compiler() is None, reason="the stand-in needs g++")


@pytest.fixture(scope="module", autouse=True)
def shaders() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.mps, "compile_shader", metal_standin.compile_shader)
        metal_trials.prepare()
        yield
    metal_launch.library.cache_clear()


@pytest.mark.parametrize("dtype", metal_trials.DTYPES, ids=str)
@pytest.mark.parametrize(("name", "id"), metal_trials.PAIRS)
def test_shaders_match_float64(name: str, id: str, dtype: torch.dtype) -> None:
    ran = 0
    for trial in metal_trials.trials(OPS[name], id, dtype):
        verdict = trial.run()
        assert verdict, f"{trial}: {verdict.reason}"
        ran += 1
    assert ran, f"{id} served no trial of {name}"


def sanitized(*bug: str) -> subprocess.CompletedProcess[str]:
    """All shaders, or linear's with a planted bug, under AddressSanitizer."""
    env = os.environ | {
        "TENSORLOGIC_METAL_SANITIZED": "1",
        "LD_PRELOAD": metal_standin.preload(),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run(
        [sys.executable, "-m", "tests.support.metal.sanitized", *bug],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizer is preloaded as Linux does it")
def test_no_shader_leaves_its_memory() -> None:
    done = sanitized()
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert int(done.stdout.split()[0]) > 2 * len(metal_trials.PAIRS)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the sanitizer is preloaded as Linux does it")
def test_a_read_past_a_tile_is_caught() -> None:
    done = sanitized("tile edge, read")
    assert done.returncode != 0
    assert "AddressSanitizer: heap-buffer-overflow" in done.stderr
    assert "READ of size 2" in done.stderr


def first(id: str) -> metal_trials.Trial:
    """linear's first trial at odd sizes."""
    found = metal_trials.trials(OPS["linear"], id, torch.float16, cases=False)
    return next(t for t in found if t.args[0].shape[0] == 17)


@pytest.mark.parametrize("id", ["metal.tiled", "metal.simdgroup"])
@pytest.mark.parametrize("order", [0, 1, 2])
@pytest.mark.parametrize(
    ("bug", "said"),
    [
        ("missing barrier before a tile is read", "that nobody wrote"),
        ("missing barrier before a tile is overwritten", "without a barrier between"),
        ("barrier that some threads do not reach", "threads wait at different places"),
    ],
)
def test_a_planted_race_is_caught_in_every_order(
    id: str, order: int, bug: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = replace(first(id), order=order)
    assert trial.run()
    metal_launch.library.cache_clear()
    monkeypatch.setattr(
        torch.mps,
        "compile_shader",
        lambda s: metal_standin.compile_shader(metal_planted.planted(s, bug)),
    )
    with pytest.raises(metal_standin.ShaderError, match=said):
        trial.run()
    metal_launch.library.cache_clear()


@pytest.mark.parametrize("id", ["metal.naive", "metal.tiled", "metal.simdgroup"])
@pytest.mark.parametrize("bug", ["tile edge, written", "transposed stride"])
def test_a_planted_wrong_address_gives_a_wrong_result(
    id: str, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = first(id)
    if id == "metal.naive" and bug == "tile edge, written":
        pytest.skip("one thread has one element, and returns before")
    metal_launch.library.cache_clear()
    monkeypatch.setattr(
        torch.mps,
        "compile_shader",
        lambda s: metal_standin.compile_shader(metal_planted.planted(s, bug)),
    )
    verdict = trial.run()
    assert not verdict
    assert str(verdict.reason).startswith("wrong: output 0")
    metal_launch.library.cache_clear()
