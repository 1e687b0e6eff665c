"""Scripts whose own sizes ask for a GPU, run in small on a CPU: they run, say right of what is right, and notice what is not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.native import cpu_library

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)


@pytest.fixture
def huge(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS / "device")
    module = importlib.import_module("huge")
    candidate_loading.ready("cpu")
    sizes = {"DEVICE": torch.device("cpu"), "OURS": ("cpu.",), "MANY": 1 << 14}
    for name, value in {**sizes, "ROWS": 200, "COLUMNS": 330, "LONG": 7000}.items():
        monkeypatch.setattr(module, name, value)
    with torch.no_grad():
        yield module


def test_every_backward_kernel_is_right(huge: ModuleType) -> None:
    seen = set()
    for make in huge.gradients():
        case = make()
        for id, _, reason in huge.backward(case):
            seen.add((case.op, id))
            assert reason is None, f"{case.name} {id}: {reason}"
    ops = ("pointwise_backward", "softmax_backward", "softmax_cross_entropy_backward")
    assert seen == {(op, "cpu.fused") for op in ops}


@pytest.mark.parametrize("at", [0, 1 << 14, -1])
@pytest.mark.parametrize("number", range(5))
def test_one_wrong_element_is_noticed(huge: ModuleType, number: int, at: int) -> None:
    """The first, the one whose place needs a bit more, and the last."""
    case = list(huge.gradients())[number]()
    out = OPS[case.op].reference(*case.args)[case.output]
    assert huge.wrong(case, out.clone()) is None or number == 4  # PyTorch rounds that one twice
    for value in (float("nan"), 100.0):
        spoilt = out.clone()
        spoilt.view(-1)[at] = value
        assert huge.wrong(case, spoilt) is not None


def test_pooled_outputs_are_compared_with_fresh_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    module = importlib.import_module("pooling")
    monkeypatch.setattr(module, "ROUNDS", 2)
    monkeypatch.setattr(module, "DEVICE", torch.device("cpu"))
    found = module.row(2)
    assert found["mib"] == 2
    assert set(found["us"]) == {"with", "without"}
    assert found["lower"] < 1
    assert "add_relu into 2 MiB" in capsys.readouterr().out
