"""Kernels on trial: right in the interpreter where it can run them, compiled without spills, and a wrong one is seen."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch

from .test_triton_rows import default_device  # noqa: F401  (a fixture, and the interpreter)

from tensorlogic.ops.common import triton_launch  # isort: skip  (after the interpreter is asked for)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities


@pytest.fixture
def shapes(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "device"))
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


@pytest.mark.parametrize(("columns", "dtype"), [(2048, "f16"), (2600, "f32")])
def test_cross_entropy_that_stays(shapes: Any, columns: int, dtype: str) -> None:
    shape = shapes.cross_entropy(19, columns, dtype, cores=1)
    called(shape, "stays 256 lanes 4 warps 4", "stays 256 lanes 2 warps 16")
    shape.sets[0][1].fill_(-100)  # nothing counts
    shape.trials["stays 256 lanes 4 warps 4"]()(*shape.sets[0])
    assert shape.sets[0][4].isnan()


def test_loss_and_gradient_in_one_pass(shapes: Any) -> None:
    called(shapes.both(5, 1000, "f16", cores=1), "one pass 16 warps 3")
    called(shapes.both(5, 256, "f32", cores=1), "one pass 16 warps 1")
    called(shapes.both(3, 5000, "f16", cores=1), "swept 512")


def test_few_rows(shapes: Any) -> None:
    called(shapes.few(1, 5000, 24, "f16"), "8x2048", "4x2048 4 warps, 2 parts")
    called(shapes.few(3, 2100, 10, "f16"), "2x2048")


def test_a_wrong_trial_is_seen(shapes: Any) -> None:
    shape = shapes.both(4, 64, "f32", cores=1)
    dx = shape.sets[0][3]
    assert shapes_miss(shape) == float("inf")  # nothing was written
    shape.trials["one pass 16 warps 3 stages 1"]()(*shape.sets[0])
    assert shapes_miss(shape) <= shape.limit
    dx[3, 63] += 1e-2
    assert shapes_miss(shape) > shape.limit


def test_they_compile_without_spilling(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "_capability", lambda device: 90)
    some = {
        "stays 512 lanes 8 warps 8": shapes.cross_entropy(2, 32000, "f16"),
        "one pass 16 warps 3 stages 1": shapes.both(2, 32000, "f16"),
        "mixed 4 128 6 1 2 1 every 3": shapes.scores(1024, 64, "f16", heads=1),
        "held 5 of 8, 4 stages, 1": shapes.scores(512, 64, "f16", heads=1),
    }
    monkeypatch.setattr(shapes, "DEVICE", torch.device("cuda", 0))
    jobs = [
        job
        for name, s in some.items()
        for job in triton_launch.collect(s.trials[name], shapes.DEVICE)
    ]
    assert len(jobs) == len(some)
    for answer in triton_launch.resources_apart(jobs):
        assert isinstance(answer, triton_launch.Resources), answer
        assert answer.stack == 0, answer
        assert answer.shared <= triton_launch.SHARED_BYTES[90]
