"""Stands for Inductor and for the clock in tests of what it competes with: graphs run as they travelled, times are given; their models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tensorlogic.compiler.inductor import comparison, compile_process, partition
from tensorlogic.compiler.reporting.report import Report, Row
from tensorlogic.compiler.rewrite.matcher import rewrite
from tensorlogic.compiler.rewrite.rule_set import RULES
from tensorlogic.compiler.runtime.program import Program
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.measure import timer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Fake:
    """Runs the graph that travelled in the place of what would be compiled, times `scale` (of runs that are left over `left_scale`).

    Times are microseconds: `us` of the whole model, `left_us` of our program with runs in it, 7 of ours, 10 of the original;
    `run_ratio` is the time of a run over what it was, with its interval.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.scale, self.us, self.started, self.writes = 1.0, 5.0, 0, True
        self.failure, self.ended, self.stopped = "", True, 0
        self.left_us, self.run_ratio = 9.0, (0.5, 0.4, 0.6)
        self.left_scale: Callable[[Path], float] = lambda artifact: self.scale
        self.rivals: dict[
            str, bool
        ] = {}  # which of "inductor" and "ours" has runs that were left over
        self.graphs: dict[Path, fx.GraphModule] = {}
        owner = self

        class Compiling(compile_process.Compiling):
            def __init__(self, orders: Any, training: bool, niceness: int = 0) -> None:
                owner.started += any(o.artifact.stem.count("-") == 0 for o in orders)
                for order in orders:
                    graph = compile_process._unpacked(compile_process._packed(order.graph))
                    owner.graphs[order.artifact] = fx.GraphModule(nn.Module(), graph)
                self.orders = list(orders)
                self.failed = {str(o.artifact): owner.failure for o in orders if owner.failure}
                self.process = owner

            def wait(self, seconds: float) -> None:
                pass

            def stop(self) -> None:
                owner.stopped += 1

        monkeypatch.setattr(compile_process, "Compiling", Compiling)
        monkeypatch.setattr(compile_process, "load", self.load)
        monkeypatch.setattr(timer, "wall_samples", self.samples)
        monkeypatch.setattr(partition, "_timed", self.timed)
        plain = comparison.Contest._timed

        def noted(self: comparison.Contest, rival: Any) -> Any:
            ours = self.ours is not None and bool(self.ours.left_over)
            owner.rivals = {"inductor": bool(rival.left_over), "ours": ours}
            return plain(self, rival)

        monkeypatch.setattr(comparison.Contest, "_timed", noted)

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def load(self, artifact: Path) -> Callable[..., Any]:
        if artifact not in self.graphs:
            raise compile_process.Unable("not loaded: it is gone")
        scale = self.left_scale(artifact) if "-" in artifact.stem else self.scale
        return lambda *flat: [
            scale * v if isinstance(v, Tensor) and v.is_floating_point() else v
            for v in torch.utils._pytree.tree_leaves(self.run(artifact, flat))
        ]

    def run(self, artifact: Path, flat: Any) -> Any:
        given = flat if self.writes else [v.clone() for v in flat]
        return self.graphs[artifact](*given)

    def samples(self, calls: Any, *_: Any, **__: Any) -> timer.Samples:
        for call in calls.values():
            call()
        us = {"before": 10.0, "ours": 7.0, "inductor": self.us}
        us |= {name: self.left_us for name, left in self.rivals.items() if left}
        return timer.Samples({name: [us.get(name, 7.0)] * 20 for name in calls})

    def timed(self, before: Any, after: Any, device: torch.device) -> timer.Samples:
        before(), after()
        ratio, low, high = self.run_ratio
        ratios = [low] * 10 + [ratio] * 3 + [high] * 10
        return timer.Samples({"before": [1.0] * 23, "inductor": ratios})


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


class Tails(nn.Module):
    """Products, and behind each of the first two the same chain; another one behind the last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 32)
        self.w = nn.Parameter(torch.rand(64))

    def chain(self, y: Tensor) -> Tensor:
        return torch.sin(y * self.w) * torch.sigmoid(y) + torch.exp(-y * y)

    def forward(self, x: Tensor) -> Tensor:
        y = self.chain(self.b(self.chain(self.a(x))))
        return torch.softmax(torch.cos(self.c(y)) + x, -1)


def x(rows: int = 64) -> Tensor:
    return torch.randn(rows, 32, device=DEVICE)


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every linear layer is replaced, and every run is worth a compilation, whatever this machine is doing."""
    monkeypatch.setattr("tensorlogic.compiler.tune.region_tuner.LEAST_GAIN", 1e9)
    monkeypatch.setattr(partition, "SHARE", 0.0)


def tails() -> nn.Module:
    return Tails().to(DEVICE).eval()


def left(report: Report) -> list[Row]:
    return [r for r in report.rows if r.op == partition.OP]


def same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def graded(model: nn.Module, given: Tensor) -> list[Tensor]:
    out = model(given)
    return [out, *torch.autograd.grad(out.square().sum(), [*model.parameters()])]


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
