"""Threads that call one captured or optimised model at once, and change between any two steps of Python."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import tensorlogic
from tensorlogic.compiler.runtime.program import Program
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.cuda_graphs import capture
from tensorlogic.cuda_graphs.captured_graph import CallTape, Tape
from tensorlogic.cuda_graphs.replay import Replay
from tensorlogic.guards import tensor_guard
from tensorlogic.guards.errors import MISS
from tensorlogic.guards.model_guard import Kept

from ..support.graphs import CUDA, DEVICE, GradientTape, KernelTape

THREADS = 6


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    """Threads of Python change as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def net() -> Any:
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)
    return nn.Sequential(*layers).eval().to(DEVICE)


def captured(fn: Callable[..., Any], **options: Any) -> capture.Captured:
    fast = tensorlogic.capture(fn, **options)
    if not CUDA:
        fast.tape = KernelTape
    return fast


def inputs(*rows: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(rows[i % len(rows)], 4, generator=g).to(DEVICE) for i in range(THREADS)]


def at_once(call: Callable[[int], bool], times: int) -> None:
    """`call(thread)` in several threads that begin together; each must hold every time."""
    begin, wrong, problems = threading.Barrier(THREADS), list[int](), list[BaseException]()

    def go(i: int) -> None:
        begin.wait()
        try:
            wrong.extend(i for _ in range(times) if not call(i))
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=go, args=(i,)) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]
    assert wrong == []


def change(model: Any, n: int) -> None:
    """Something else of the model each time: where weights lie, their numbers, unseen by PyTorch or not, attributes."""
    weight = model[n % 2 * 3].weight
    with torch.no_grad():
        if n % 4 == 0:
            weight.data = torch.randn_like(weight)
        elif n % 4 == 1:
            weight.mul_(-1.5)
        else:
            weight.data.mul_(-0.7)
        if n % 5 == 0:
            model[1].running_mean.add_(0.5)
        if n % 7 == 0:
            model.extra = n
    model[3].bias.requires_grad_(n % 3 > 0)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [captured, tensorlogic.optimize])
def test_models_that_change_between_calls(make: Callable[..., Any], grad: bool) -> None:
    model, given = net(), inputs(3)
    with torch.set_grad_enabled(grad):
        fast = make(model) if make is captured else make(model, given[0])

    def call(i: int) -> bool:
        with torch.set_grad_enabled(grad):
            return torch.allclose(fast(given[i]), model(given[i]), atol=1e-4, rtol=1e-4)

    for n in range(30):
        change(model, n)
        at_once(call, 6)
    if make is captured:
        assert fast.reason is None
        for _ in range(4):
            call(0)
        assert fast.graphs == 1


@torch.no_grad()
def test_more_kinds_than_are_kept() -> None:
    model, given = net(), inputs(1, 2, 3, 4, 5)
    fast = captured(model, max_graphs=2)
    expected = [model(x) for x in given]

    def call(i: int) -> bool:
        with torch.no_grad():
            right = torch.allclose(fast(given[i]), expected[i], atol=1e-5)
            return right and fast.graphs <= 2 and fast.nbytes >= 0

    at_once(call, 200)
    assert fast.reason is None


def test_a_recording_is_found_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread that calls while what was recorded is not yet complete finds none."""
    model, x = net(), torch.ones(3, 4, device=DEVICE)
    fast, found = captured(model), list[Tensor]()
    asked = vars(capture)["Asked"]

    def meanwhile(*args: Any) -> Any:
        other = threading.Thread(target=lambda: found.append(fast(x)))
        other.start()
        other.join()
        return asked(*args)

    monkeypatch.setattr(capture, "Asked", meanwhile)
    for _ in range(capture.EAGER_CALLS + 1):
        torch.testing.assert_close(fast(x), model(x))
    assert len(found) == 1
    torch.testing.assert_close(found[0], model(x))
    assert (fast.graphs, fast.reason) == (1, None)


@torch.no_grad()
def test_one_recording_serves_those_that_waited_for_it() -> None:
    model, x = net(), torch.ones(3, 4, device=DEVICE)
    fast = captured(model)
    for _ in range(capture.EAGER_CALLS + 1):
        fast(x)
    (entry,) = fast.entries.values()
    flat, spec = pytree.tree_flatten(((x,), {}))
    first = entry.recorded
    assert first is not None
    assert fast._capture(entry, flat, spec, x.device) is first  # as who was second


def test_a_guard_that_is_compiled_anew_is_asked_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    kept, guard, found = Kept([weight]), tensor_guard.guard, list[bool]()

    def meanwhile(tensors: Any) -> Any:
        monkeypatch.setattr(tensor_guard, "guard", guard)
        other = threading.Thread(target=lambda: found.append(kept.holds()))
        other.start()
        other.join()
        return guard(tensors)

    monkeypatch.setattr(tensor_guard, "guard", meanwhile)
    weight.requires_grad_(False)
    assert kept.holds()
    assert found == [True]


@torch.no_grad()
def test_policies_side_by_side() -> None:
    """What was replayed last under one policy is not handed to a call under another."""
    x = torch.ones(3, 4, device=DEVICE)
    fast = captured(lambda v: v * (2 if tensorlogic.core.policy.current().force else 3))

    def call(i: int) -> bool:
        with torch.no_grad(), tensorlogic.policy(force="torch.eager" if i % 2 else None):
            return torch.equal(fast(x), x * (2 if i % 2 else 3))

    at_once(call, 300)
    assert all(map(call, range(6)))  # those of which the threads were too soon
    assert (fast.graphs, fast.reason) == (2, None)


@torch.no_grad()
def test_inputs_that_are_written_to_are_not_filled_up() -> None:
    """A graph of a whole bucket serves no call that is filled up to it: what it writes would be lost."""

    def fn(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    fast = captured(fn, batch=0, buckets=[4])
    for _ in range(4):
        fast(torch.ones(4, 2, device=DEVICE))
    assert fast.graphs == 1
    x = torch.ones(3, 2, device=DEVICE)
    assert torch.equal(fast(x), torch.full((3, 2), 4.0, device=DEVICE))
    assert torch.equal(x, torch.full((3, 2), 2.0, device=DEVICE))
    assert "filled up" in str(fast.reason)


def test_gradients_of_calls_side_by_side() -> None:
    """The next forward begins when the caller has its gradients, which lie where the next backward writes."""
    model, given = net(), inputs(3)
    wanted = [*model.parameters()]
    fast = tensorlogic.capture(model)
    fast.tape = CallTape if CUDA else GradientTape
    expected = [torch.autograd.grad(model(x).square().sum(), wanted) for x in given]

    def call(i: int) -> bool:
        found = torch.autograd.grad(fast(given[i]).square().sum(), wanted)
        return all(map(torch.allclose, found, expected[i]))

    at_once(call, 150)
    assert all(map(call, range(4)))
    assert (fast.graphs, fast.reason) == (1, None)


class Two(nn.Module):
    """Tells its inputs apart."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.lin(x)) - 2 * y


@torch.no_grad()
def test_calls_by_keyword_beside_others() -> None:
    """What leads one form of call to a replay leads no other there, whose inputs come in another order."""
    model, (x, y, *_) = Two().eval().to(DEVICE), inputs(3)
    traced = trace(model, (), {"y": y, "x": x})
    expected = model(x, y)

    def call(i: int, program: Program) -> bool:
        with torch.no_grad():
            out = program((x, y), {}) if i % 2 else program((), {"y": y, "x": x})
        return out is MISS or torch.equal(out, expected)

    for _ in range(20):
        program = Program(traced, traced.graph, {}, False, model)
        tape = Tape if CUDA else KernelTape
        program.replay = Replay(program.function.run, traced.example, program.device, tape=tape)
        program.pointers = program._where()
        at_once(partial(call, program=program), 5)
