"""Traced graphs of earlier processes: taken where the model makes exactly their calls, traced anew everywhere else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tensorlogic
from tensorlogic.compiler import trace_cache
from tensorlogic.compiler.trace import traced_graph
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.compiler.trace.serialization import Unpackable, packed, unpacked
from tensorlogic.compiler.tune import decision_store
from tensorlogic.guards.errors import Untraceable
from tensorlogic.guards.tensor_tree import storage
from tensorlogic.system import settings

HELP: Callable[[Tensor, Tensor], Tensor] = lambda y, x: y * 2.0  # noqa: E731  # part of no class


class Net(nn.Module):
    """Views, a write that nobody sees, two weights of one shape, a helper of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.swap, self.slope = False, 0.5

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first, second = (self.b, self.a) if self.swap else (self.a, self.b)
        y = self.norm(first(x)).relu_()
        p, q = HELP(second(y), x).chunk(2, -1)
        return {"p": F.leaky_relu(p, self.slope), "q": q.t()}


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What torch.export was asked to trace."""
    asked: list[Any] = []
    plain = torch.export.export

    def counted(model: nn.Module, *rest: Any) -> Any:
        asked.append(model)
        return plain(model, *rest)

    monkeypatch.setattr(torch.export, "export", counted)
    return asked


def graph_of(model: nn.Module, x: Tensor) -> traced_graph.Trace:
    with torch.no_grad():
        return trace_cache.traced(model, model, (x,), {})


def file() -> Path:
    (found,) = (settings.cache_folder() / "graphs").glob("*.json")
    return found


def test_the_second_process_traces_nothing(exported: list[Any]) -> None:
    first = graph_of(Net().eval(), torch.randn(4, 8))
    net, x = Net().eval(), torch.randn(4, 8)  # other weights, other inputs
    second = graph_of(net, x)
    assert len(exported) == 1
    assert decision_store.text_of(first) == decision_store.text_of(second)
    shared = []
    for found in (first, second):
        memory = [storage(n) for n in found.graph.nodes]
        shared.append([m if m is None else memory.index(m) for m in memory])
    assert shared[0] == shared[1]
    assert {n: m for n, (m, _) in first.state.items()} == {n: m for n, (m, _) in second.state.items()}  # fmt: skip
    assert all(t is net.get_parameter(m) for m, t in second.state.values() if "weight" in m)
    marks = [[n.meta.get("constant") for n in t.graph.nodes] for t in (first, second)]
    assert marks[0] == marks[1]


@torch.no_grad()
def test_the_model_is_served_rightly(exported: list[Any]) -> None:
    for _ in range(2):
        net, x = Net().eval(), torch.randn(4, 8)
        net.norm.running_var.uniform_(0.5, 2)
        fast = tensorlogic.optimize(net, x)
        for given in (x, torch.randn(4, 8)):
            torch.testing.assert_close(fast(given), net(given))
    assert len(exported) == 1


def _doubled(y: Tensor, x: Tensor) -> Tensor:
    return y * (2.0 if x.numpy().any() else 3.0)


def _told(y: Tensor, x: Tensor) -> Tensor:
    return y * (2.0 if x.tolist() else 3.0)


def _asked(y: Tensor, x: Tensor) -> Tensor:
    return y * 2.0 if x.sum() != 77.0 else y


CHANGES: dict[str, Callable[[Net, pytest.MonkeyPatch], Any]] = {
    "another weight": lambda net, _: setattr(net, "swap", True),
    "another number": lambda net, _: setattr(net, "slope", 0.25),
    "training": lambda net, _: net.norm.train(),
    "no bias": lambda net, _: setattr(net.a, "bias", None),
    "a hook": lambda net, _: net.b.register_forward_hook(lambda m, given, out: out + 1.0),
    "other code": lambda net, patch: patch.setattr(Net, "extra", lambda self: 1, raising=False),
    "a value as an array": lambda net, patch: patch.setitem(globals(), "HELP", _doubled),
    "a value as a list": lambda net, patch: patch.setitem(globals(), "HELP", _told),
    "a value in a condition": lambda net, patch: patch.setitem(globals(), "HELP", _asked),
    "another output": lambda net, patch: patch.setitem(globals(), "HELP", lambda y, x: y + 1.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_traced(
    change: str, exported: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(4, 8)
    graph_of(Net().eval(), x)
    assert graph_of(Net().eval(), x)
    assert len(exported) == 1
    net = Net().eval()
    CHANGES[change](net, monkeypatch)
    try:
        graph_of(net, x)
    except Untraceable:
        assert "value" in change
    assert len(exported) == 2


@pytest.mark.parametrize("damage", ["cut", "foreign", "another op", "another size"])
def test_damaged_files(damage: str, exported: list[Any]) -> None:
    x = torch.randn(4, 8)
    graph_of(Net().eval(), x)
    text = file().read_text()
    spoilt = {
        "cut": text[: len(text) // 2],
        "foreign": "[1, 2]",
        "another op": text.replace("aten::leaky_relu", "aten::relu6"),
        "another size": text.replace("2.0", "2.5"),
    }
    file().write_text(spoilt[damage])
    net = Net().eval()
    graph_of(net, x)
    assert len(exported) == 2
    assert file().read_text() == text  # whole again


def test_models_that_write_are_traced_each_time(exported: list[Any]) -> None:
    for _ in range(2):
        graph_of(Net().train(), torch.randn(4, 8))
    assert len(exported) == 2
    assert not (settings.cache_folder() / "graphs").exists()


def test_the_oldest_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_cache, "MOST", 2)
    for rows in (3, 4, 5):
        graph_of(Net().eval(), torch.randn(rows, 8))
    assert len(list((settings.cache_folder() / "graphs").iterdir())) == 2


def test_graphs_as_data() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            y = torch.full((2, 3), float("inf"), dtype=torch.float64, device=x.device)
            a, b = torch.split(x, [1, 2], 0)
            return a.expand(2, 3) + y, b.to(torch.float64, memory_format=torch.contiguous_format)

    graph = trace(Odd(), (torch.randn(3, 3),), {}).exported.graph
    data = packed(graph)
    again = unpacked(data)
    assert packed(again) == data
    made = fx.GraphModule(nn.Module(), again)
    x = torch.randn(3, 3)
    torch.testing.assert_close(tuple(made(x)), Odd()(x))
    graph = fx.Graph()
    graph.call_function(len, ([1],))
    kept = packed(graph)
    with pytest.raises(TypeError, match="JSON"):
        json.dumps(kept)
    (node,) = unpacked(kept).nodes
    assert (node.target, node.args) == (len, ([1],))
    block = fx.Graph()
    block.get_attr("inner")
    with pytest.raises(Unpackable, match="inner"):
        packed(block)
