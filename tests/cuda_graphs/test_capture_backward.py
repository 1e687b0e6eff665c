"""What happens around a captured call's backward pass: hooks, checkpoints, derivatives of derivatives, several calls at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import tensorlogic
from tensorlogic.cuda_graphs.captured_graph import CallTape
from tensorlogic.cuda_graphs.replay import GradientReplay, Replay

from ..support.graphs import CUDA, DEVICE, GradientTape, net, recorded


def rows(count: int = 3) -> Tensor:
    return torch.randn(count, 4, device=DEVICE)


def gradients(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    model.zero_grad()
    call(x).square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_hooks_of_parameters_run_once() -> None:
    model = net()
    heard: list[int] = []

    def double(grad: Tensor) -> Tensor:
        heard.append(1)
        return grad * 2

    model[0].weight.register_hook(double)  # type: ignore[union-attr, arg-type]
    fast = recorded(model)
    for count in range(1, 7):
        x = rows()
        found = gradients(model, fast, x)
        assert len(heard) == 2 * count - 1
        torch.testing.assert_close(found, gradients(model, model, x))
    assert fast.graphs == 1


def test_checkpoints_see_what_is_saved() -> None:
    model = net()
    fast = recorded(model)
    for reentrant in (False, True):
        kept = functools.partial(checkpoint, fast, use_reentrant=reentrant)
        for _ in range(5):
            x = rows().requires_grad_()
            found = gradients(model, kept, x)
            torch.testing.assert_close(found, gradients(model, model, x))
        assert (fast.graphs, fast.reason) == (2 * reentrant, None)


@pytest.mark.parametrize("inside", [False, True])
def test_hooks_of_saved_tensors_are_called(inside: bool) -> None:
    """Also where earlier calls had none, and where backward is a part of the call."""
    model, packed = net(), list[Tensor]()

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().sum()
        if inside:
            model.zero_grad()
            loss.backward()
            return loss.detach()
        return loss

    fast = recorded(step)
    for _ in range(5):
        out = fast(rows())
        if not inside:
            out.backward()
    assert fast.graphs == 1

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        fast(rows())
    assert packed
    assert (fast.graphs, fast.reason) == (1, None)


def test_derivatives_of_derivatives_are_refused() -> None:
    model = net()
    fast = recorded(model)
    for _ in range(5):
        x = rows().requires_grad_()
        fast(x).sum().backward()
    assert fast.graphs == 1
    with pytest.raises(RuntimeError, match=r"double backward .* is not available through a graph"):
        torch.autograd.grad(fast(x).sum(), x, create_graph=True)
    found = gradients(model, fast, x)  # and then goes on
    torch.testing.assert_close(found, gradients(model, model, x))


@torch.no_grad()
def test_derivatives_forward_and_modes_are_the_functions_own() -> None:
    model = net()
    fast, x, along = recorded(model), rows(), rows()
    for _ in range(5):
        fast(x)
    assert fast.graphs == 1

    def forward(call: Callable[..., Any]) -> Any:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(call(forward_ad.make_dual(x, along))).tangent

    torch.testing.assert_close(forward(fast), forward(model))
    for transform in (
        lambda f: torch.func.vmap(f)(torch.stack((x, along))),
        lambda f: torch.func.jvp(f, (x,), (along,))[1],
        lambda f: torch.func.grad(lambda v: f(v).square().sum())(x),
    ):
        torch.testing.assert_close(transform(fast), transform(model))

    class Doubling(TorchFunctionMode):
        def __torch_function__(
            self, fn: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = fn(*args, **(kwargs or {}))
            return out * 2 if fn is torch.nn.functional.linear else out

    with Doubling():
        torch.testing.assert_close(fast(x), model(x))
    assert (fast.graphs, fast.reason) == (1, None)


def test_memory_that_a_backward_pass_waits_for_is_no_other_graphs() -> None:
    """Graphs of forward and backward have a pool for themselves; those without gradients share one, and take turns."""
    pools: list[Any] = []

    class Pooled(CallTape if CUDA else GradientTape):  # type: ignore[misc]
        def __init__(self, device: torch.device, pool: Any) -> None:
            super().__init__(device, pool)
            pools.append(pool)

    model, runs = net(), []

    def run(x: Tensor) -> Any:
        runs.append(1)
        return model(x)

    fast = tensorlogic.capture(run)
    fast.tape = Pooled
    for count in (3, 5):
        for _ in range(4):
            fast(rows(count)).sum().backward()
    assert pools == [None] * 4  # each its own
    given = [rows(count) for count in (3, 5)]

    def twice(call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        """Two backward passes after each other's forward, and after each other."""
        model.zero_grad()
        outs = [call(x).square().sum() for x in given]
        for _ in range(2):
            for out in outs:
                out.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return [p.grad for p in model.parameters()]

    before = len(runs)
    found, wanted = twice(fast), twice(model)
    assert len(runs) == before
    torch.testing.assert_close(found, wanted)

    pools.clear()
    with torch.no_grad():
        for count in (3, 5):
            for _ in range(4):
                fast(rows(count))
        assert pools[0] is not None
        assert pools[0] == pools[1]
        one, two = fast.replays()[2:]
        assert isinstance(one, Replay)
        assert isinstance(two, Replay)
        assert one.line is two.line
        before = len(runs)
        with ThreadPoolExecutor(1) as pool:  # another thread is being served
            assert pool.submit(one.line.enter).result()
            x = rows(5)
            torch.testing.assert_close(fast(x), model(x))
            assert len(runs) == before + 1
            one.line.leave()
        torch.testing.assert_close(fast(x), model(x))
        assert len(runs) == before + 1
        fast.entries.clear()  # as where the module is another one
        for _ in range(4):
            fast(rows())
        assert pools[2] != pools[0]  # in which somebody's gradients may lie


def test_what_arguments_hold_is_read_at_every_call() -> None:
    """Modules, optimizers and bound methods hold what no key tells."""
    model = net()
    opt = torch.optim.SGD(model.parameters(), lr=0.5)
    calls: list[tuple[Callable[..., Any], Any, str]] = [
        (lambda m, x: m(x), model, "Sequential"),
        (lambda m, x: m(x), model.forward, "method"),
        (lambda o, x: x * o.param_groups[0]["lr"], opt, "SGD"),
    ]
    with torch.no_grad():
        for fn, held, name in calls:
            fast = recorded(fn)
            for _ in range(5):
                fast(held, rows())
            assert (fast.graphs, name in str(fast.reason)) == (0, True)
            model[0].weight.data = torch.randn(8, 4, device=DEVICE)
            opt.param_groups[0]["lr"] /= 2
            x = rows()
            torch.testing.assert_close(fast(held, x), fn(held, x))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["register_forward_hook", "register_forward_pre_hook"])
def test_hooks_of_the_captured_module_itself(kind: str) -> None:
    model = net()
    fast, x = recorded(model), rows()

    def double(module: nn.Module, *values: Any) -> Any:
        return values[-1][0] * 2 if kind.endswith("pre_hook") else values[-1] * 2

    for _ in range(5):
        fast(x)
    assert fast.graphs == 1
    hook = getattr(model, kind)(double)
    for _ in range(5):
        torch.testing.assert_close(fast(x), model(x))
    assert fast.graphs == 1
    hook.remove()
    torch.testing.assert_close(fast(x), model(x))


class OnceTape:
    """Records as a graph does: what was called is not kept."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        """Nothing is needed of either."""

    def record(self, fn: Callable[[], Any]) -> Any:
        return fn()


def test_nodes_of_the_recording_are_let_go() -> None:
    """Gradients of parameters whose nodes lived on would be added on the stream of the recording, with a warning each time."""
    model, x = net(), rows()
    weight = model[0].weight

    def node() -> (
        Any
    ):  # what adds up the gradients of a leaf, which lives as long as something needs it
        return weight.view_as(weight).grad_fn.next_functions[0][0]  # type: ignore[operator, union-attr]

    def run(x: Tensor) -> list[Tensor]:
        node().metadata["recorded"] = True
        out = model(x)
        assert "recorded" not in node().metadata  # of a first node that is gone
        node().metadata["recorded"] = True
        return [out, out.detach()]

    tape = CallTape if CUDA else OnceTape
    replay = GradientReplay(run, [x], list(model.parameters()), x.device, tape)
    assert "recorded" not in node().metadata
    assert replay.wanted == [True, False]
