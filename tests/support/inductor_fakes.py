"""A stand-in for Inductor and for the clock: graphs run as they travelled, times are given; and the models to try them with."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tensorlogic.compiler.inductor import compile_process
from tensorlogic.compiler.rewrite.matcher import rewrite
from tensorlogic.compiler.rewrite.rule_set import RULES
from tensorlogic.compiler.runtime.program import Program
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.compiler.trace.serialization import packed, unpacked
from tensorlogic.measure import timer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Fake:
    """Runs the graph that travelled in the place of what would be compiled, times `scale`.

    Times are microseconds: `us` of the whole model by Inductor, 7 of ours, 10 of the original.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scale, self.us, self.started, self.writes = 1.0, 5.0, 0, True
        self.failure, self.ended, self.stopped = "", True, 0
        self.graphs: dict[Path, fx.GraphModule] = {}
        owner = self

        class Compiling(compile_process.Compiling):
            def __init__(
                self, trace: Any, artifact: Path, training: bool, niceness: int = 0
            ) -> None:
                owner.started += 1
                graph = unpacked(pickle.loads(pickle.dumps(packed(trace.graph, values=False))))
                owner.graphs[artifact] = fx.GraphModule(nn.Module(), graph)
                self.artifact, self.failed, self.process = artifact, owner.failure or None, owner

            def wait(self, seconds: float) -> None:
                pass

            def stop(self) -> None:
                owner.stopped += 1

        monkeypatch.setattr(compile_process, "Compiling", Compiling)
        monkeypatch.setattr(compile_process, "load", self.load)
        monkeypatch.setattr(timer, "wall_samples", self.samples)

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def load(self, artifact: Path) -> Callable[..., Any]:
        if artifact not in self.graphs:
            raise compile_process.Unable("not loaded: it is gone")
        return lambda *flat: [
            self.scale * v if isinstance(v, Tensor) and v.is_floating_point() else v
            for v in torch.utils._pytree.tree_leaves(self.run(artifact, flat))
        ]

    def run(self, artifact: Path, flat: Any) -> Any:
        given = flat if self.writes else [v.clone() for v in flat]
        return self.graphs[artifact](*given)

    def samples(self, calls: Any, *_: Any, **__: Any) -> timer.Samples:
        for call in calls.values():
            call()
        us = {"before": 10.0, "ours": 7.0, "inductor": self.us}
        return timer.Samples({name: [us.get(name, 7.0)] * 20 for name in calls})


class Chain(nn.Module):
    """Many element-wise steps behind a product: what Inductor does well."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.w = nn.Linear(32, 48), nn.Parameter(torch.randn(48))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.first(x)
        for i in range(4):
            y = torch.sin(y * self.w + i) * torch.sigmoid(y) + y
        return {"y": y.softmax(-1), "mean": y.mean(-1)}


class Normed(nn.Module):
    """Changes its buffers at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.bn = nn.Linear(32, 48, bias=False), nn.BatchNorm1d(48)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.bn(self.a(x)))


def x(rows: int = 64) -> Tensor:
    return torch.randn(rows, 32, device=DEVICE)


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def program_of(model: nn.Module, *given: Tensor) -> Program:
    """The program with every linear layer replaced, nothing timed."""
    traced = trace(model, given, {})
    graph = fx.Graph()
    graph.output(graph.graph_copy(traced.graph, {}))
    plain = {n.name: n.meta for n in traced.graph.nodes}
    for node in graph.nodes:
        node.meta = dict(plain.get(node.name, {}))
    rewrite(graph, RULES)
    return Program(traced, graph, {}, False, model)
