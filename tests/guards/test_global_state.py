"""What a model asks PyTorch about the state around a call is asked again at every later one: never the answer of the example."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.cuda_graphs.captured_graph import CallTape
from tensorlogic.cuda_graphs.replay import Replay

from ..support.graphs import (
    CUDA,
    DEVICE,
    QUESTIONS,
    KernelTape,
    PythonTape,
    flagged,
    optimized,
    some,
    with_gradient,
)


class Box:
    """Holds a tensor."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows


class Asking(nn.Module):
    """Ten times as much where the answer is yes."""

    def __init__(self, question: str) -> None:
        super().__init__()
        self.question = question
        self.lin = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor, box: Box | None = None) -> Tensor:
        y = F.relu(self.lin(x))
        if QUESTIONS[self.question][0](x):
            y = y * 10
        if box is not None:
            box.rows = y + box.rows
        return y


def captured(model: nn.Module) -> Any:
    fast = tensorlogic.capture(model)
    fast.tape = CallTape if CUDA else KernelTape
    with torch.no_grad():
        for _ in range(4):
            fast(some())
    assert fast.graphs == 1
    return fast


def replayed(model: nn.Module) -> Any:
    """A program as it would be on a GPU: what is recorded is replayed, and calls find the short way there."""
    fast, x = optimized(model, some()), some()
    program = fast._program
    if not CUDA:
        program.replay = Replay(program.function.run, [x], x.device, tape=PythonTape)  # type: ignore[arg-type]
        program.pointers = program._where()
    assert program.replay is not None
    with torch.no_grad():
        fast(x)
    return fast


PATHS: dict[str, Callable[[nn.Module], Any]] = {
    "traced": lambda m: optimized(m, some()),
    "objects": lambda m: optimized(m, some(), Box(torch.ones(4, 8, device=DEVICE))),
    "training": lambda m: optimized(m.requires_grad_(True), some(), training=True),
    "replayed": replayed,
    "captured": captured,
}


@pytest.mark.parametrize("path", list(PATHS))
@pytest.mark.parametrize("question", list(QUESTIONS))
def test_the_answer_is_todays(question: str, path: str, pays: None) -> None:
    _, around, make = QUESTIONS[question]
    model = Asking(question).to(DEVICE).eval()
    plain = copy.deepcopy(model)
    fast = PATHS[path](model)

    def same(x: Tensor) -> None:
        ones = [torch.ones(4, 8, device=DEVICE) for _ in range(2)]
        boxes = [(Box(rows),) if path == "objects" else () for rows in ones]
        ours, theirs = fast(x, *boxes[0]), plain(x, *boxes[1])
        if theirs.is_meta:
            assert ours.is_meta
            return
        torch.testing.assert_close(ours, theirs)
        if boxes[0]:
            torch.testing.assert_close(boxes[0][0].rows, boxes[1][0].rows)

    recorded = contextlib.nullcontext if path == "training" else torch.no_grad
    with recorded():
        for _ in range(3):
            same(some())
        x = make()
        for _ in range(4):  # as often as a new graph takes
            with around():
                same(x)
        same(some())


class Traced(nn.Module):
    """Does something else while it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.lin(x))
        return y * 10 if torch.compiler.is_compiling() else y


@torch.no_grad()
@pytest.mark.parametrize("precision", [None, "f32"])
def test_who_asks_whether_it_is_traced_comes_back_as_it_was(
    precision: str | None, pays: None
) -> None:
    model, x = Traced().to(DEVICE).eval(), some()
    expected = model(x)
    if precision is not None:
        with pytest.raises(ValueError, match="not the model's"):
            tensorlogic.optimize(model, x, precision=precision)
        return
    fast = tensorlogic.optimize(model, x)
    assert fast.report.reason == "the graph's outputs are not the model's"
    assert torch.equal(fast(x), expected)


def test_nothing_is_asked_of_models_that_ask_nothing(pays: None) -> None:
    fast = optimized(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE).requires_grad_(False).eval(), some()
    )
    assert fast._program.asks is None
    assert not fast._program.asked.looks
    assert fast._program((some(),), {}) is not tensorlogic.guards.errors.MISS  # recorded or not


@torch.no_grad()
def test_a_model_that_reads_a_gradient_comes_back_as_it_was_or_in_pieces(pays: None) -> None:
    model, x = Asking("has a gradient").to(DEVICE).eval(), with_gradient()
    fast = tensorlogic.optimize(model, x)
    for given in (x, some(), with_gradient()):
        torch.testing.assert_close(fast(given), Asking.forward(model, given))


class Scaled(nn.Module):
    """A weight that carries its scale, as quantised ones do."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)
        self.lin.weight.scale = 2.0  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        scale: float = self.lin.weight.scale  # type: ignore[attr-defined]
        return F.relu(self.lin(x)) * scale


@torch.no_grad()
def test_attributes_of_weights_are_followed(pays: None) -> None:
    model, x = Scaled().to(DEVICE).eval(), some()
    for fast in (tensorlogic.optimize(model, x), captured(model)):
        for scale in (2.0, 3.0, 3):
            model.lin.weight.scale = scale  # type: ignore[assignment]
            torch.testing.assert_close(fast(x), Scaled.forward(model, x))


@torch.no_grad()
def test_advice_to_compilers_is_no_attribute(pays: None) -> None:
    fast, x = optimized(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE).eval(), some()), some()
    x._dynamo_static_input_type = "guarded"  # type: ignore[attr-defined]
    assert fast._program((x,), {}) is not tensorlogic.guards.errors.MISS
    assert fast._program((flagged(),), {}) is tensorlogic.guards.errors.MISS


@torch.no_grad()
def test_precision_set_in_pytorchs_two_ways(pays: None) -> None:
    """PyTorch's own question raises then."""
    before = torch._C._get_fp32_precision_getter("cuda", "matmul")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new"):
            torch.get_float32_matmul_precision()
        optimized(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE).eval(), some())
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
