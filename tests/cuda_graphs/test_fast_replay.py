"""The short way to a replay: taken by calls that look like the last one, left by everything else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import tensorlogic
from tensorlogic.cuda_graphs.fast_replay import short
from tensorlogic.cuda_graphs.replay import GradientReplay, Replay
from tensorlogic.guards.errors import MISS
from tensorlogic.guards.model_guard import Kept, Watch

from ..support.graphs import CUDA, DEVICE, PythonTape, captured


class Scaled(nn.Module):
    """A linear layer, batch norm, a parameter of one element and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.scale, self.power = nn.Parameter(torch.ones(1)), 1

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu(self.norm(self.lin(x)) * self.scale + 1) ** self.power
        return y


CHANGES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda m: m.lin.weight.mul_(2),
    "folded away": lambda m: m.norm.running_var.mul_(9),
    "one element": lambda m: m.scale.mul_(3),
    "data": lambda m: setattr(m.lin.weight, "data", torch.ones(4, 4, device=DEVICE)),
    "data of other strides": lambda m: setattr(m.lin.weight, "data", m.lin.weight.data.t()),
    "data of another shape": lambda m: setattr(m.lin.bias, "data", torch.ones(1, device=DEVICE)),
    "state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "another parameter": lambda m: setattr(
        m, "scale", nn.Parameter(torch.full((1,), 2.0, device=DEVICE))
    ),
    "another module": lambda m: setattr(m, "lin", nn.Linear(4, 4).to(DEVICE)),
    "attribute": lambda m: setattr(m, "power", 2),
    "mode": lambda m: m.train(),
    "hook": lambda m: m.lin.register_forward_hook(lambda _, args, out: out + 1),
}
WRITTEN = ("in place", "folded away", "one element", "state_dict")  # a graph reads what is there


def optimized(x: Tensor) -> nn.Module:
    """A program that is replayed, and by now in the short way."""
    fast = tensorlogic.optimize(Scaled().to(DEVICE).eval(), x, budget_s=0.2)
    program = fast._program
    assert program is not None, fast.report
    if not CUDA:
        program.replay = Replay(program.function.run, [x], x.device, tape=PythonTape)  # type: ignore[arg-type]
        program.pointers = program._where()
    fast(x)
    assert program.way is not None
    assert program.way[0](x) is not MISS
    return fast


@torch.no_grad()
@pytest.mark.parametrize("change", list(CHANGES))
def test_changes_of_an_optimised_model_are_followed(pays: None, change: str) -> None:
    x = torch.randn(3, 4, device=DEVICE)
    fast = optimized(x)
    before = fast(x).clone()
    CHANGES[change](fast)
    for _ in range(3):  # the long way, then the short one again where there is one
        expected = Scaled.forward(copy.deepcopy(fast), x)
        torch.testing.assert_close(fast(x), expected)
    assert not torch.allclose(fast(x), before)


@torch.no_grad()
@pytest.mark.parametrize("change", list(CHANGES))
def test_changes_of_a_captured_module_are_followed(change: str) -> None:
    x, model = torch.randn(3, 4, device=DEVICE), Scaled().to(DEVICE).eval()
    fast = captured(model)
    for _ in range(5):
        before = fast(x)
    assert fast.way is not None
    assert fast.way[0](x) is not MISS
    CHANGES[change](model)
    if change not in WRITTEN:
        assert fast.way[0](x) is MISS
    for _ in range(5):
        expected = copy.deepcopy(model)(x)
        torch.testing.assert_close(fast(x), expected)
    assert not torch.allclose(fast(x), before)


class Watching(TorchFunctionMode):
    """Sees PyTorch's functions."""

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **(kwargs or {}))


def test_other_calls_take_the_long_way(pays: None) -> None:
    x = torch.randn(3, 4, device=DEVICE)
    with torch.no_grad():
        fast = optimized(x)
        way: Callable[..., Any] = fast._program.way[0]
        others = [(x[:2],), (x.t()[:3],), (x.double(),), (x, x), (), (None,), (nn.Parameter(x),)]
        assert all(way(*args) is MISS for args in others)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert way(x) is MISS
        with Watching():
            assert way(x) is MISS
        with torch.device("meta"):  # where what lies elsewhere goes by default: nobody watches
            torch.testing.assert_close(way(x), Scaled.forward(fast, x))
    assert way(x) is MISS  # gradients are recorded here
    assert fast(x).requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), Scaled.forward(fast, x))


def test_outputs_are_the_callers_own_and_modes_are_as_before(pays: None) -> None:
    x = torch.randn(3, 4, device=DEVICE)
    with torch.no_grad():
        fast = optimized(x)
        first, second = fast(x), fast(x + 1)
        assert first.data_ptr() != second.data_ptr()
    step = captured(lambda v: v.detach() * 2)
    for _ in range(5):
        out = step(x)
        assert torch.is_grad_enabled()
        assert not out.requires_grad
    assert step.way is not None
    assert step.way[0](x) is not MISS


def test_a_frozen_module_that_is_captured_may_be_unfrozen() -> None:
    x, model = torch.randn(3, 4, device=DEVICE), nn.Linear(4, 4).to(DEVICE).requires_grad_(False)
    fast = captured(model)
    for _ in range(5):
        assert not fast(x).requires_grad
    assert fast.graphs == 1
    model.requires_grad_(True)
    assert fast(x).requires_grad


def test_kept_tensors_are_told_under_every_mode() -> None:
    tensors = [nn.Parameter(torch.randn(4, 4)), torch.zeros(3), torch.eye(2).to_sparse()]
    kept = Kept([*tensors, tensors[0]])
    modes: list[Any] = [torch.no_grad, torch.enable_grad, torch.inference_mode]
    for mode in modes:
        with mode():
            assert kept.holds()
            assert torch.is_grad_enabled() is (mode is torch.enable_grad)
    tensors[0].requires_grad_(False)
    checks = kept.checks
    assert kept.holds()
    assert kept.checks is not checks  # from now on in the quick way again
    checks = kept.checks
    assert kept.holds()
    assert kept.checks is checks
    tensors[0].data = tensors[0].data.t()
    for mode in modes:
        with mode():
            assert not kept.holds()
    with torch.inference_mode():
        assert Kept(tensors).holds()
    assert Kept([]).holds()


def test_equal_parameters_of_one_element_are_told_apart() -> None:
    model = Scaled()
    watch = Watch(model)
    assert watch.holds()
    model.scale = nn.Parameter(model.scale.detach().clone())
    assert not watch.holds()


class Recorded(GradientReplay):
    """Stands for the graphs of a forward and a backward pass."""

    def __init__(self) -> None:
        self.device, self.calls = torch.device("cpu"), 0

    def __call__(self, flat: Any) -> Any:
        self.calls += 1
        return [flat[0] * 2]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_replay_that_records_is_asked_for_first(when: str) -> None:
    """A backward pass waits for what it gives: it cannot be thrown away where the model is no longer as it was."""
    steady, replay, x = [True], Recorded(), torch.ones(3)
    way = short(replay, [x], pytree.tree_structure(x), **{when: lambda: steady[0]})
    assert way is not None
    assert torch.equal(way(x), x * 2)
    steady[0] = False
    assert way(x) is MISS
    assert replay.calls == 1
