"""Kernels on trial: right in the interpreter where it can run them, compiled without spills, and a wrong one is seen."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ..support.triton import default_device  # noqa: F401  (a fixture, and the interpreter)

from tensorlogic.kernels.triton_runtime import launch  # isort: skip  (after the interpreter is asked for)
from ..support.compiled import resources  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "device"))
    return importlib.import_module("trial_shapes")


def called(shape: Any, *names: str) -> None:
    """Call the trials whose names begin so, each on outputs full of NaN, and compare with float64."""
    found = [name for name in shape.trials if name.startswith(names)]
    assert found
    for name in found:
        importlib.import_module("trial_shapes").poison(shape)
        assert shape.trials[name]()(*shape.sets[0])
        assert shapes_miss(shape) <= shape.limit, name


def shapes_miss(shape: Any) -> float:
    return float(importlib.import_module("trial_shapes").miss(shape))


def test_loss_and_gradient_in_one_pass(shapes: Any) -> None:
    called(shapes.both(5, 1000, "f16", cores=1), "one pass 16 warps 3")
    called(shapes.both(5, 256, "f32", cores=1), "one pass 16 warps 1")
    called(shapes.both(3, 5000, "f16", cores=1), "swept 512")


def test_a_wrong_trial_is_seen(shapes: Any) -> None:
    shape = shapes.both(4, 64, "f32", cores=1)
    dx = shape.sets[0][3]
    assert shapes_miss(shape) == float("inf")  # nothing was written
    shape.trials["one pass 16 warps 3 stages 1"]()(*shape.sets[0])
    assert shapes_miss(shape) <= shape.limit
    dx[3, 63] += 1e-2
    assert shapes_miss(shape) > shape.limit


def test_they_compile_without_spilling(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    some = {
        "one pass 16 warps 3 stages 1": shapes.both(2, 32000, "f16"),
        "swept 1024 lanes 16 warps": shapes.both(2, 128256, "f16"),
    }
    monkeypatch.setattr(shapes, "DEVICE", torch.device("cuda", 0))
    jobs = [
        job for name, s in some.items() for job in launch.collect(s.trials[name], shapes.DEVICE)
    ]
    assert len(jobs) == len(some)
    for answer in resources(jobs):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, answer
        assert answer.shared <= launch.SHARED_BYTES[90]
