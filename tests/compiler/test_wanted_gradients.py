"""optimize in training: gradients of whatever wants them now, not when the model was optimised or first called."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

import tensorlogic
from tensorlogic.compiler.runtime import program as runtime_program
from tensorlogic.compiler.runtime.codegen import OTHERS
from tensorlogic.compiler.trace.compiled_call import Compiled
from tensorlogic.cuda_graphs.replay import Replay
from tensorlogic.guards.errors import MISS

from ..support.graphs import DEVICE, PythonTape


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).to(DEVICE)  # fmt: skip


def gradients(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Of all parameters and the input."""
    model.zero_grad()
    x = x.detach().requires_grad_(x.requires_grad)
    out = model(x)
    if out.requires_grad:
        out.square().sum().backward()
    return [*(p.grad for p in model.parameters()), x.grad]


def same(model: nn.Module, plain: nn.Module, x: Tensor) -> None:
    for ours, theirs in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_layers_that_were_frozen_learn_once_they_may(pays: None) -> None:
    model, x = net(), torch.randn(6, 16, device=DEVICE)
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    plain = copy.deepcopy(model)
    fast = tensorlogic.optimize(model, x, training=True)
    assert fast is not model
    same(fast, plain, x)
    for layer, on in ((2, True), (0, True), (4, False), (0, False), (4, True), (2, False)):
        for each in (fast, plain):
            each[layer].requires_grad_(on)
        same(fast, plain, x)
        same(fast, plain, x.clone().requires_grad_())


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode, nullcontext])
def test_a_restored_program_may_be_called_without_gradients_first(
    first: Callable[[], Any], pays: None
) -> None:
    """Its ops are bound by its first call, whatever that is."""
    model, x = net(), torch.randn(6, 16, device=DEVICE)
    tensorlogic.optimize(model, x, training=True)
    fast, plain = tensorlogic.optimize(model, x, training=True), net()
    assert any("earlier process" in note for note in fast.report.notes)
    for _ in range(2):
        with first():
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-3, atol=1e-3)
        same(fast, plain, x)


def test_what_is_bound_is_kept_and_reads_todays_weights(pays: None) -> None:
    model, x = net(), torch.randn(6, 16, device=DEVICE)
    plain = copy.deepcopy(model)
    fast = tensorlogic.optimize(model, x, training=True)
    function, runs = fast._program.function, set()
    for turn in range(3):
        for on in (True, False):
            for each in (fast, plain):
                each[0].requires_grad_(on)
                with torch.no_grad():
                    each[2].weight.mul_(1.1)
                    each[4].weight = nn.Parameter(each[4].weight * 0.9)
            same(fast, plain, x)
            runs.add(id(function.of(fast._program._wanted([x], True))))
        assert len(runs) == 2, turn
    for n in range(OTHERS + 3):
        function.of(n)
    assert len(function._others) == OTHERS


def test_what_inductor_compiled_gives_no_other_gradients(pays: None) -> None:
    """It was compiled for what wanted them: other calls are the model's own."""
    model, x = net(), torch.randn(6, 16, device=DEVICE)
    model[0].requires_grad_(False)
    program = tensorlogic.optimize(model, x, training=True)._program
    graph = fx.Graph()
    node = graph.placeholder("x")
    graph.output(graph.call_function(Compiled(lambda v: [v * 2], False), (node,)))
    made = runtime_program.Program(program.trace, program.graph, {}, True, model)
    assert made.fixed == []
    made.made, made.fixed = True, [t for t in made.held if not t.requires_grad]
    assert made((x,), {}) is not MISS
    assert made((x.clone().requires_grad_(),), {}) is MISS
    model[0].requires_grad_(True)
    assert made((x,), {}) is MISS
    with torch.no_grad():
        assert made((x,), {}) is not MISS
    assert any(isinstance(n.target, Compiled) for n in graph.nodes)


def test_a_recorded_step_is_not_replayed_for_inputs_that_want_more(pays: None) -> None:
    """What was recorded for an input without gradients has none for it."""
    model, x = net(), torch.randn(6, 16, device=DEVICE)
    plain = copy.deepcopy(model)
    fast = tensorlogic.optimize(model, x, training=True)
    program, served = fast._program, []

    def replay(flat: Any) -> Any:
        served.append(1)
        return program.function.run(*flat)

    program.replay, program.pointers = replay, program._where()
    program._shorten = lambda *given: None
    same(fast, plain, x)
    assert len(served) == 1
    same(fast, plain, x.clone().requires_grad_())
    assert len(served) == 1
    same(fast, plain, x)
    assert len(served) == 2


class Norms(nn.Module):
    """Norms that keep running statistics, which PyTorch writes without saying so."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3)
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.last = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()) + self.norm.running_var.sqrt().view(-1, 1, 1)  # fmt: skip


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("whatever_pays", [False, True])
def test_instance_norms_statistics_are_the_models(
    training: bool, whatever_pays: bool, request: pytest.FixtureRequest
) -> None:
    if whatever_pays:
        request.getfixturevalue("pays")
    torch.manual_seed(0)
    model, x = Norms().to(DEVICE).train(), torch.randn(2, 3, 12, 12, device=DEVICE) + 1
    plain = copy.deepcopy(model)
    with torch.set_grad_enabled(training):
        fast = tensorlogic.optimize(model, x, training=training)
        assert torch.equal(model.norm.running_mean, plain.norm.running_mean)
        assert torch.equal(model.norm.running_var, plain.norm.running_var)
        for _ in range(3):
            torch.testing.assert_close(fast(x), plain(x), rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(fast.norm.running_mean, plain.norm.running_mean)
            torch.testing.assert_close(fast.norm.running_var, plain.norm.running_var)


class Halves(nn.Module):
    """Hands out a part of what is computed of a weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, _ = (self.weight * 2).chunk(2, 0)
        mean = torch.var_mean(self.weight.exp(), 1)[1]
        return self.layer(x).relu() + mean, first, torch.topk(self.weight, 2).values


@torch.no_grad()
def test_parts_of_weights_that_are_handed_out(pays: None) -> None:
    """They are computed at every call, by a graph that was recorded, too."""
    model, x = Halves().to(DEVICE).eval(), torch.randn(4, 8, device=DEVICE)
    fast = tensorlogic.optimize(model, x)
    assert fast is not model
    for _ in range(2):
        for ours, theirs in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(ours, theirs)
        model.weight.mul_(1.5)


class Pairs(nn.Module):
    """What is computed of a weight alone are several tensors at once, of which one is handed out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(self.weight, 1)
        return nn.functional.linear(x, self.weight).relu() * mean, var


@torch.no_grad()
def test_several_constants_at_once_are_written_where_a_graph_reads_them(pays: None) -> None:
    model, x = Pairs().to(DEVICE).eval(), torch.randn(4, 8, device=DEVICE)
    program = tensorlogic.optimize(model, x)._program
    assert any(isinstance(value, tuple) for value in program.constants.values())
    kept = {id(t) for t in pytree.tree_leaves(program.constants)}
    program.replay = Replay(program.function.run, [x], x.device, tape=PythonTape)  # type: ignore[arg-type]
    program.pointers = program._where()
    for _ in range(3):
        for ours, theirs in zip(program((x,), {}), model(x), strict=True):
            torch.testing.assert_close(ours, theirs)
        assert {id(t) for t in pytree.tree_leaves(program.constants)} == kept
        assert program.replay is not None
        model.weight.mul_(1.5)
