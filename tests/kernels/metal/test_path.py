"""From the public call to the shader's output on a pretended Apple GPU, and what is said where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ...support.metal import on_mps as metal_on_mps
from ...support.metal import standin as metal_standin

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check said, all in one process, since a device once registered stays."""
    folder = tmp_path_factory.mktemp("mps")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TENSORLOGIC_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.metal.on_mps"],
        env=env, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {r["name"]: r["problem"] for r in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(
    metal_standin.compiler() is None or sys.platform != "linux",
    reason="the device is pretended with g++ on Linux; a Mac has a real one",
)
@pytest.mark.parametrize("name", [check.__name__ for check in metal_on_mps.CHECKS])
def test_on_a_pretended_apple_gpu(found: dict[str, str], name: str) -> None:
    assert found[name] == "", found[name]
