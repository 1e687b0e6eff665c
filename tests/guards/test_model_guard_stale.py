"""optimize: whatever a model reads besides its weights may change afterwards, and the next call knows it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler.runtime import program as runtime_program
from tensorlogic.core.weight_cache import CACHE
from tensorlogic.guards import weight_fingerprint

SCALE = 1.0
TABLE = {"shift": 0.5}
LOG: list[int] = []


class Reader(nn.Module):
    """Reads a configuration, private and class attributes, a list, a plain tensor and globals."""

    bias = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.config = SimpleNamespace(factor=1.0, inner=SimpleNamespace(power=1))
        self._hidden, self.steps = 1.0, [1.0, 2.0]
        self.mask = torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.lin(x)) * self.config.factor * self._hidden * self.mask
        y = y**self.config.inner.power + self.bias + sum(self.steps)
        return y * SCALE + TABLE["shift"]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "configuration": lambda m: setattr(m.config, "factor", 3.0),
    "inner configuration": lambda m: setattr(m.config.inner, "power", 2),
    "another configuration": lambda m: setattr(
        m, "config", SimpleNamespace(factor=2.0, inner=m.config.inner)
    ),
    "private attribute": lambda m: setattr(m, "_hidden", 2.0),
    "class attribute": lambda m: setattr(m, "bias", 1.0),
    "list": lambda m: m.steps.append(3.0),
    "plain tensor": lambda m: m.mask.mul_(2),
    "another plain tensor": lambda m: setattr(m, "mask", torch.full((4,), 3.0)),
    "global": lambda m: globals().update(SCALE=2.0),
    "content of a global": lambda m: TABLE.update(shift=2.0),
}


@torch.no_grad()
@pytest.mark.parametrize("change", list(CHANGES))
def test_what_a_model_reads_may_change(
    pays: None, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "SCALE", 1.0)
    monkeypatch.setitem(TABLE, "shift", 0.5)
    fast = tensorlogic.optimize(Reader().eval(), torch.ones(2, 4))
    x = torch.ones(2, 4)
    assert fast.report.outcome == "rewritten", fast.report.reason
    assert fast._program((x,), {}) is not None
    before = fast(x).clone()
    CHANGES[change](fast)
    torch.testing.assert_close(fast(x), Reader.forward(fast, x))
    assert not torch.equal(fast(x), before)


class Logging(nn.Linear):
    """Changes a global at every call."""

    def forward(self, x: Tensor) -> Tensor:
        LOG.append(len(x))
        return super().forward(x)


class Counting(nn.Linear):
    """Counts its calls in an attribute that it has from the beginning."""

    calls = 0

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: Logging(4, 4), Counting])
def test_models_that_change_something_come_back_as_they_were(
    pays: None, make: Callable[[], nn.Module]
) -> None:
    model = make()
    fast = tensorlogic.optimize(model, torch.ones(2, 4))
    assert fast is model
    assert "changes" in fast.report.reason
    assert getattr(model, "calls", 0) == 0


class Counted(nn.Module):
    """A product or a convolution, then batch norm as a module, which counts its batches, or as a function, which does not."""

    def __init__(self, flat: bool, module: bool) -> None:
        super().__init__()
        self.first: nn.Module = nn.Linear(6, 8) if flat else nn.Conv2d(6, 8, 3)
        self.norm = nn.BatchNorm1d(8) if flat else nn.BatchNorm2d(8)
        self.module = module
        if not module:
            self.norm.register_buffer("num_batches_tracked", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.module:
            return torch.relu(self.norm(self.first(x)))
        mean, var = self.norm.running_mean, self.norm.running_var
        y = nn.functional.batch_norm(self.first(x), mean, var, training=self.training)
        return torch.relu(y)

    def versions(self) -> list[int]:
        return [
            t._version for t in (self.norm.running_mean, self.norm.running_var) if t is not None
        ]


@torch.no_grad()
@pytest.mark.parametrize("flat", [True, False], ids=["linear", "convolution"])
@pytest.mark.parametrize("module", [True, False], ids=["module", "function"])
@pytest.mark.parametrize("who", ["itself", "the given model"])
def test_statistics_that_training_wrote_without_a_version(
    flat: bool, module: bool, who: str, pays: None
) -> None:
    model = Counted(flat, module).eval()
    x = torch.randn((32, 6) if flat else (4, 6, 8, 8))
    fast = tensorlogic.optimize(model, (x,))
    before, versions = fast(x), model.versions()
    for each in (fast, model):
        each.train()
    (fast if who == "itself" else model)(x)
    assert versions == model.versions()
    for each in (fast, model):
        each.eval()
    assert (fast(x) - before).abs().max() > 0.01
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


class Views(nn.Module):
    """What depends on weights alone is computed ahead: expanded, or a view of a weight's own memory."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.row = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(1, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        halves = self.w.view(2, 2, 4)
        return x @ halves[0].t() + x @ halves[1].t(), x + (self.row * 3).expand(5, 4)


@torch.no_grad()
def test_constants_follow_and_own_only_what_was_copied(pays: None) -> None:
    model, x = Views().eval(), torch.randn(5, 4)
    fast = tensorlogic.optimize(model, x)

    def follows() -> None:
        version = model.w._version
        for got, wanted in zip(fast(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted)
        assert model.w._version == version  # reading wrote to no weight

    follows()
    model.row.add_(1)
    model.w.mul_(2)
    follows()
    saved, known = model.w.data, model.w.detach().clone()
    model.w.data = torch.randn(4, 4)  # as averages of weights are put in and taken out
    follows()
    assert torch.equal(saved, known)
    model.w.data = saved
    follows()
    assert torch.equal(saved, known)


class Folded(nn.Sequential):
    """A convolution whose batch norm is folded into it, and layers whose weights may be packed."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(288, 64),
            nn.GELU(),
            nn.Linear(64, 64),
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_writes_that_pytorch_does_not_count(pays: None, dtype: torch.dtype) -> None:
    model, x = Folded().eval().to(dtype), torch.randn(2, 3, 8, 8, dtype=dtype)
    fast = tensorlogic.optimize(model, x)

    def follows() -> None:
        for _ in range(3):
            torch.testing.assert_close(fast(x), model(x), rtol=0.03, atol=0.03)

    follows()
    before = model(x)
    for p in model.parameters():
        p.data.mul_(1.5)
    assert (model(x) - before).abs().max() > 0.3
    follows()
    for p in model.parameters():  # elsewhere first, then written to there
        p.data = p.data.clone()
    follows()
    for p in model.parameters():
        p.data.copy_(p.data * 0.5)
    follows()
    versions = [p._version for p in model.parameters()]
    follows()
    assert [p._version for p in model.parameters()] == versions


@torch.no_grad()
def test_what_else_was_derived_goes_with_such_a_write(pays: None) -> None:
    model, x = Folded().eval(), torch.randn(2, 3, 8, 8)
    fast = tensorlogic.optimize(model, x)
    fast(x)
    written, other = model[4].weight, model[6].weight
    for weight in (written, other):
        CACHE.get(weight, "copy", torch.clone, lambda t: t.nbytes)
    written.data.mul_(2)
    fast(x)
    assert not CACHE.holds(written, "copy")
    assert CACHE.holds(other, "copy")


@torch.no_grad()
def test_invalidate_reaches_programs(pays: None) -> None:
    model, x = Folded().eval(), torch.randn(2, 3, 8, 8)
    fast = tensorlogic.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    row = model[0].weight.data[5]  # no element that is looked at
    row.zero_()
    tensorlogic.invalidate(model[0].weight)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_somebodys_graph_holds_no_constants(pays: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is recorded into a caller's own CUDA graph reads the weights as they are at each replay."""
    model, x = Folded().eval(), torch.randn(2, 3, 8, 8)
    fast = tensorlogic.optimize(model, x)
    program = fast._program
    assert len(program.watched) > 0
    runs, run = list[int](), program.function.run

    def counted(*given: Any) -> Any:
        runs.append(1)
        return run(*given)

    program.function.run = counted
    fast(x)
    assert runs == [1]
    monkeypatch.setattr(runtime_program, "_capturing", lambda _: True)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    model[0].weight.mul_(2)
    stamp = program.stamp
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    assert (runs, program.stamp) == ([1], stamp)  # nothing is renewed while it is recorded
    monkeypatch.undo()
    torch.testing.assert_close(fast(x), model(x), rtol=1e-3, atol=1e-3)
    assert (runs, program.stamp == stamp) == ([1, 1], False)


class Cut(nn.Module):
    """Two graphs, with Python between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.first(x))
        return self.last(y if y.sum().item() > -1 else -y)


@pytest.mark.parametrize("kind", [Cut, Reader])
@torch.no_grad()
def test_hooks_that_come_later_run(kind: type[nn.Module], pays: None) -> None:
    torch._dynamo.reset()
    model, x = kind().eval(), torch.randn(3, 4)
    fast = tensorlogic.optimize(model, x)
    assert fast.report.outcome == "rewritten", fast.report.reason
    inner, seen = next(m for m in fast.modules() if isinstance(m, nn.Linear)), list[Any]()
    plain = fast(x)
    hook = inner.register_forward_hook(lambda m, args, out: out * 0)
    assert not torch.equal(fast(x), plain)
    hook.remove()
    torch.testing.assert_close(fast(x), plain)
    hook = nn.modules.module.register_module_forward_hook(lambda m, *_: seen.append(m))
    try:
        torch.testing.assert_close(fast(x), plain)
    finally:
        hook.remove()
    assert inner in seen
    seen.clear()
    torch.testing.assert_close(fast(x), plain)
    assert not seen


KINDS: dict[str, float] = {}  # what a library knows of a class, by its name


class Registered(nn.Module):
    """Asks for its own class by its name, as libraries do that keep tables of models."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        KINDS[str(type(self))] = 2.0

    def forward(self, x: Tensor, scaled: bool = False) -> Tensor:
        y = torch.relu(self.lin(x))
        return y * KINDS.get(str(type(self)), 0.0) if scaled else y


@torch.no_grad()
def test_the_class_keeps_its_name(pays: None) -> None:
    model, x = Registered().eval(), torch.randn(3, 4)
    fast = tensorlogic.optimize(model, x)
    assert fast is not model
    assert type(fast).__qualname__ == "Registered"
    assert repr(fast) == repr(model)
    torch.testing.assert_close(fast(x, True), model(x, True))


def test_weights_that_are_looked_at_may_lose_their_memory_for_a_while() -> None:
    """As FSDP takes it away between uses; NumPy's arrays would have forbidden that for ever."""
    weight, turned = torch.randn(6, 4), torch.randn(4, 6).half().t()
    looked = weight_fingerprint.Samples([weight, turned, torch.tensor(2.0)])
    turned.data[3, 0] = 7.0  # its middle
    assert [t is turned for t in looked.unseen()] == [True]
    kept, storage = weight.clone(), weight.untyped_storage()
    storage.resize_(0)
    assert looked.unseen() == []
    storage.resize_(kept.untyped_storage().nbytes())
    weight.data.copy_(kept)
    assert looked.unseen() == []
    weight.data.mul_(2)
    assert [t is weight for t in looked.unseen()] == [True]
