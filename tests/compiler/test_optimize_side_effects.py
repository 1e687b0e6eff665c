"""What optimize must not do to a model, to its caller, or to what the model's own code would have done."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tensorlogic
from tensorlogic.compiler.optimize import OptimizedModule, _extended
from tensorlogic.compiler.runtime.program import PATIENCE, REST
from tensorlogic.compiler.trace.exporter import trace, witness
from tensorlogic.guards.errors import MISS
from tensorlogic.guards.python_globals import Reach

from ..support.inductor_fakes import program_of


def layers(wide: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, wide), nn.GELU(), nn.Linear(wide, 16))


class Target(nn.Module):
    """A target network that follows the other one with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.online, self.target = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.nn.functional.gelu(self.online(x))
        with torch.no_grad():
            pairs = zip(self.target.parameters(), self.online.parameters(), strict=True)
            for ours, theirs in pairs:
                ours.mul_(0.5).add_(theirs, alpha=0.5)
            y = self.target(x)
        return z - y


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("make", [Target, lambda: nn.Embedding(9, 16, max_norm=1.0)])
def test_parameters_that_forward_writes_to_are_as_they_were(
    pays: None, make: Callable[[], nn.Module], training: bool
) -> None:
    model = make().train(training)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    x = torch.arange(9) if isinstance(model, nn.Embedding) else torch.randn(4, 16)
    made = tensorlogic.optimize(model, x, training=training)
    assert made is model
    assert "writes to its parameter" in str(made.report.reason)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


class Seeding(nn.Module):
    def __init__(self, seed: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.seed = layers(), seed

    def forward(self, x: Tensor) -> Tensor:
        self.seed()
        return self.inner(x) + torch.randn(16)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("seed", "served"),
    [
        (lambda: torch.manual_seed(3), False),
        (lambda: torch.default_generator.manual_seed(3), False),
        (lambda: torch.Generator().manual_seed(3), True),
    ],
)
def test_a_seed_in_forward_counts_at_every_call(
    pays: None, seed: Callable[[], Any], served: bool
) -> None:
    model, x = Seeding(seed).eval(), torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        if served:
            assert "seeds" not in str(fast.report.reason)
            return
        assert torch.equal(fast(x), fast(x))
        torch.testing.assert_close(fast(x), model(x))


def test_forward_mode_derivatives_are_the_models_own(pays: None) -> None:
    model, x = layers().eval(), torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        assert isinstance(fast, OptimizedModule)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            tangents = [forward_ad.unpack_dual(f(dual)).tangent for f in (model, fast)]
    assert tangents[1] is not None
    torch.testing.assert_close(tangents[0], tangents[1])


def test_threads_that_optimize_leave_the_streams_and_the_log_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sys.stdout, sys.stderr, logging.root.manager.disable
    problems: list[BaseException] = []

    def work(i: int) -> None:
        try:
            with torch.no_grad(), tensorlogic.policy(tune="off"):
                tensorlogic.optimize(layers(16 + i).eval(), torch.randn(4, 16), budget_s=0.0)
        except BaseException as problem:
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    said = 0
    while any(t.is_alive() for t in threads):
        print("still here")
        said += 1
        threads[0].join(0.01)
    for t in threads:
        t.join()
    assert not problems
    assert (sys.stdout, sys.stderr, logging.root.manager.disable) == before
    assert capsys.readouterr().out.count("still here") == said


def test_a_stream_that_a_model_keeps_writes_on(capsys: pytest.CaptureFixture[str]) -> None:
    with witness() as seen:
        kept = sys.stdout
        print("within")
    print("after", file=kept)
    assert seen.text == "within\n"
    assert capsys.readouterr().out == "after\n"


def test_registries_of_classes_do_not_hear_of_ours(pays: None) -> None:
    known: dict[str, type] = {}

    class Base(nn.Module):
        def __init_subclass__(cls, **words: Any) -> None:
            super().__init_subclass__(**words)
            if cls.__name__ in known:
                raise ValueError(f"{cls.__name__} is known already")
            known[cls.__name__] = cls

    class Net(Base):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    x = torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(Net().eval(), x)
        assert isinstance(fast, OptimizedModule)
        assert known == {"Base": Base, "Net": Net} or known == {"Net": Net}
        assert type(fast)()(x).shape == (4, 16)  # as target networks are made


def test_classes_that_cannot_be_extended_come_back(pays: None) -> None:
    class Meta(type):
        def __new__(cls, name: str, bases: tuple[type, ...], held: dict[str, Any]) -> Meta:
            if any(isinstance(b, Meta) for b in bases):
                raise RuntimeError(f"{name} is final")
            return super().__new__(cls, name, bases, held)

    class Net(nn.Module, metaclass=Meta):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

    model = Net().eval()
    with torch.no_grad():
        assert tensorlogic.optimize(model, torch.randn(4, 16)) is model
    assert "is final" in str(model.report.reason)


@pytest.mark.parametrize("last", [nn.ReLU(), nn.Identity(), nn.PixelShuffle(2)])
def test_images_are_handed_out_as_the_model_lays_them(pays: None, last: nn.Module) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), last
    ).eval()  # fmt: skip
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        ours, theirs = fast(x), model(x)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours.stride() == theirs.stride()
        near = x.contiguous(memory_format=torch.channels_last)
        assert fast(near).stride() == model(near).stride()


class Calls(TorchDispatchMode):
    """What PyTorch is asked to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_weights_that_were_replaced_are_not_compared_number_by_number(pays: None) -> None:
    model, x = layers().eval(), torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        assert isinstance(fast, OptimizedModule)
        served: Any = fast.__dict__["_program"]
        program = getattr(served, "program", served)
        first = fast[0].weight
        fast[0].weight = nn.Parameter(first * 2)
        fast(x)  # the first look
        with Calls() as calls:
            assert not program.watch.holds()
        assert not calls.names
        for _ in range(PATIENCE + 3):
            torch.testing.assert_close(fast(x), nn.Module.__call__(fast, x))
        assert program.resting > 0
        fast[0].weight = first
        torch.testing.assert_close(fast(x), model(x))
        for _ in range(REST + 1):
            fast(x)
        assert program.refused == program.resting == 0
        torch.testing.assert_close(fast(x), model(x))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_checkpointed_activations_are_not_kept(pays: None) -> None:
    model = Checkpointed()
    assert tensorlogic.optimize(model, torch.randn(4, 16), training=True) is model
    assert "checkpoints" in str(model.report.reason)


class Graph(nn.Module):
    def __init__(self, adjacency: Tensor) -> None:
        super().__init__()
        self.inner = layers()
        self.register_buffer("adjacency", adjacency)

    def forward(self, x: Tensor) -> Tensor:
        return self.adjacency @ self.inner(x)  # type: ignore[no-any-return, operator]


@pytest.mark.parametrize("kind", ["coo", "csr"])
def test_sparse_buffers_leave_the_model_as_it_is(kind: str) -> None:
    dense = (torch.rand(4, 4) > 0.5).float()
    model = Graph(dense.to_sparse() if kind == "coo" else dense.to_sparse_csr()).eval()
    with torch.no_grad():
        assert tensorlogic.optimize(model, torch.randn(4, 16)) is model
    assert "adjacency is sparse" in str(model.report.reason)


def test_sparse_gradients_leave_the_model_as_it_is() -> None:
    model = nn.Sequential(nn.Embedding(9, 16, sparse=True), layers())
    assert tensorlogic.optimize(model, torch.arange(9), training=True) is model


def test_an_optimized_model_can_be_scripted_and_optimized_again(pays: None) -> None:
    model, x = layers().eval(), torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        report = fast.report
        assert tensorlogic.optimize(fast, x) is fast
        assert fast.report is report
        torch.testing.assert_close(torch.jit.script(fast)(x), model(x))


def test_the_class_that_optimize_makes_is_not_followed_as_the_users_code() -> None:
    model, made = Target(), Target()
    _extended(made)
    assert isinstance(made, OptimizedModule)
    assert [names for _, names in Reach(made).scopes] == [names for _, names in Reach(model).scopes]
    assert Reach(made).classes == Reach(model).classes


def test_hooks_of_parameters_hear_of_real_steps_alone(pays: None) -> None:
    model, x = layers(), torch.randn(4, 16)
    heard: list[Tensor] = []
    model[0].weight.register_hook(heard.append)  # type: ignore[union-attr, arg-type]
    fast = tensorlogic.optimize(model, x, training=True)
    assert isinstance(fast, OptimizedModule)
    assert not heard
    fast(x).sum().backward()
    assert len(heard) == 1


def test_gradients_of_gradients_are_to_be_had_from_the_models_own_code(pays: None) -> None:
    model, x = layers(), torch.randn(4, 16)
    fast = tensorlogic.optimize(model, x, training=True)
    found = []
    for call in (model, fast):
        z = x.clone().requires_grad_()
        with tensorlogic.policy(force="torch.eager"):
            (slope,) = torch.autograd.grad(call(z).sum(), z, create_graph=True)
            found.append(torch.autograd.grad(slope.norm(), z)[0])
    torch.testing.assert_close(*found)


def test_a_model_held_to_a_precision_serves_as_soon_as_it_is_itself_again() -> None:
    model, x = layers().eval(), torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x, precision="f32")
        first = fast[0].weight  # type: ignore[index]
        fast[0].weight = nn.Parameter(first * 2)  # type: ignore[index]
        for _ in range(PATIENCE + 3):
            with pytest.raises(RuntimeError, match="has changed since"):
                fast(x)
        fast[0].weight = first  # type: ignore[index]
        torch.testing.assert_close(fast(x), model(x))


def test_what_a_model_gives_to_be_scripted_is_scripted(pays: None) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = layers()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

        def __prepare_scriptable__(self) -> nn.Module:
            return self.inner

    model, x = Net().eval(), torch.randn(4, 16)
    with torch.no_grad():
        fast = tensorlogic.optimize(model, x)
        assert isinstance(fast, OptimizedModule)
        assert torch.jit.script(fast).original_name == torch.jit.script(model).original_name


class Blocks(nn.Module):
    """Blocks in which autocast is off, or on; some hold blocks."""

    def __init__(self, on: bool, within: str) -> None:
        super().__init__()
        self.inner, self.on, self.within = nn.Linear(64, 64), on, within
        self.register_buffer("angles", torch.randn(64))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = y = self.inner(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.on):
            x = torch.relu(x.float()) * 2
            if self.within == "two outputs":
                y = torch.tanh(x @ self.inner.weight.to(x.dtype))
            elif self.within == "another":
                with torch.autocast("cpu", torch.bfloat16):
                    y = self.inner(y)
            elif self.within == "no_grad":
                with torch.no_grad():
                    y = (self.angles.float() * 2).cos()
        return self.inner(x), y


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("within", ["nothing", "two outputs", "another", "no_grad"])
@pytest.mark.parametrize("on", [False, True])
def test_blocks_that_switch_autocast(on: bool, within: str, training: bool, pays: None) -> None:
    """As models compute angles or a softmax with autocast off, whatever is around them."""
    model, x = Blocks(on, within).train(training), torch.randn(32, 64)
    tolerance = 2e-2 if on or within == "another" else 1e-5
    with torch.set_grad_enabled(training):
        fast = tensorlogic.optimize(model, x, training=training, budget_s=0.5)
        assert isinstance(fast, OptimizedModule)
        wrapped = torch.ops.higher_order.wrap_with_autocast
        held = any(n.target is wrapped for n in trace(model, (x,), {}).graph.nodes)
        assert held == (on or within == "another")
        for mode in (contextlib.nullcontext(), torch.autocast("cpu", torch.bfloat16)):
            with mode:
                for ours, plain in zip(fast(x), model(x), strict=True):
                    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    if training:
        ours, plain = (gradients(each(x), model) for each in (fast, model))
        torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("within", ["nothing", "two outputs", "another", "no_grad"])
def test_blocks_without_autocast_within_it(within: str, training: bool, pays: None) -> None:
    model, x = Blocks(False, within).train(training), torch.randn(32, 64)
    with torch.set_grad_enabled(training), torch.autocast("cpu", torch.bfloat16):
        fast = tensorlogic.optimize(model, x, training=training, budget_s=0.5)
        assert isinstance(fast, OptimizedModule), fast.report.reason
        for ours, plain in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(ours, plain, rtol=2e-2, atol=2e-2)


def gradients(outs: tuple[Tensor, Tensor], model: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(outs[0].float().square().mean(), list(model.parameters()))


class Angles(nn.Module):
    """Computes angles from its buffer without gradients, as rotary embeddings do; `of` is what else the block is given."""

    def __init__(self, of: str) -> None:
        super().__init__()
        self.inner, self.of = nn.Linear(16, 16), of
        self.register_buffer("rates", torch.rand(16))
        self.register_buffer("seen", torch.zeros(16))
        self.scale = nn.Parameter(torch.rand(16), requires_grad=False)

    def forward(self, given: Tensor, at: Tensor) -> Tensor:
        x = self.inner(given)
        with torch.no_grad():
            angles = (self.rates.float() * at.float()).cos()
            if self.of == "a parameter":
                angles = angles * self.inner.bias
            elif self.of == "a frozen parameter":
                angles = angles * self.scale
            elif self.of == "activations":
                angles = angles * x.mean(0)
            elif self.of == "an input":
                angles = angles * given
            elif self.of == "gradients again":
                with torch.enable_grad():
                    angles = angles * 2
            elif self.of == "writes":
                self.seen.add_(1)
        return torch.relu(x) * angles + self.seen


@pytest.mark.parametrize(
    "of",
    [
        "",
        "a parameter",
        "a frozen parameter",
        "activations",
        "an input",
        "gradients again",
        "writes",
    ],
)
def test_blocks_without_gradients(of: str, pays: None) -> None:
    model, x, at = Angles(of).train(), torch.randn(4, 16), torch.arange(4)[:, None]
    wrapped = torch.ops.higher_order.wrap_with_set_grad_enabled
    held = any(n.target is wrapped for n in trace(model, (x, at), {}).graph.nodes)
    assert held == (of in ("a parameter", "a frozen parameter", "activations", "an input"))
    fast = tensorlogic.optimize(model, (x, at), training=True, budget_s=0.5)
    assert isinstance(fast, OptimizedModule), fast.report.reason
    twin = copy.deepcopy(model)
    for frozen in (True, False):  # what is frozen while optimizing may learn later
        for each in (model, twin):
            each.scale.requires_grad_(not frozen)
        ours, plain = fast(x, at), twin(x, at)
        torch.testing.assert_close(ours, plain)
        torch.testing.assert_close(model.seen, twin.seen)
        for out, holder in ((ours, model), (plain, twin)):
            holder.zero_grad()
            out.square().mean().backward()
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
    learning = [x.clone().requires_grad_() for _ in range(2)]
    for each, given in zip((fast, twin), learning, strict=True):
        each(given, at).square().mean().backward()
    torch.testing.assert_close(learning[0].grad, learning[1].grad)


class Named(nn.Module):
    """Takes what it takes by name."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, shift: Tensor | None = None, *, twice: bool = False) -> Tensor:
        """Of x, and of a shift."""
        out = self.layer(x).relu()
        out = out if shift is None else out + shift
        return out * 2 if twice else out


@torch.no_grad()
def test_forward_shows_the_models_signature(pays: None) -> None:
    """Trainers choose columns by it, exporters name what varies."""
    model, x = Named().eval(), torch.randn(4, 8)
    fast = tensorlogic.optimize(model, {"x": x, "shift": x})
    assert fast is not model
    assert inspect.signature(fast.forward) == inspect.signature(model.forward)
    assert fast.forward.__doc__ == model.forward.__doc__
    batch = torch.export.Dim("batch", min=2)
    exported = torch.export.export(fast, (x, x), dynamic_shapes={"x": {0: batch}, "shift": {0: batch}})  # fmt: skip
    y = torch.randn(6, 8)
    torch.testing.assert_close(exported.module()(y, y), model(y, y))
    torch.testing.assert_close(fast(x=x, shift=x), model(x, x))


@pytest.mark.parametrize("training", [False, True])
def test_an_optimized_model_can_be_compiled_as_one_graph(training: bool, pays: None) -> None:
    model, x = Named().train(training), torch.randn(4, 8)
    fast = tensorlogic.optimize(model, x, training=training)
    assert fast is not model
    with torch.set_grad_enabled(training):
        whole = torch.compile(fast, fullgraph=True, backend="eager")
        torch.testing.assert_close(whole(x), model(x))
        assert whole(x).requires_grad == training


@torch.no_grad()
def test_a_program_looks_at_nothing_while_others_watch() -> None:
    """Its questions about inputs would be traced, or heard by the caller's modes, as the model's own."""
    x, heard = torch.randn(3, 4), list[str]()
    program = program_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU()).eval(), x)

    class Hears(TorchFunctionMode):
        def __torch_function__(
            self, fn: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            heard.append(str(fn))
            return fn(*args, **(kwargs or {}))

    for given in (x, torch.randn(5, 4)):
        assert (program((given,), {}) is MISS) == (given is not x)
        with Hears():
            assert program((given,), {}) is MISS
    assert heard == []
