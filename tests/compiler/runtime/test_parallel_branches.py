"""Independent branches: which calls may run side by side, the function that forks and joins, and when that is kept."""

from __future__ import annotations

import functools
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensorlogic.compiler.reporting.report import Report
from tensorlogic.compiler.runtime import program as runtime_program
from tensorlogic.compiler.runtime.codegen import Function
from tensorlogic.compiler.runtime.parallel_branches import LANES, Section, sections
from tensorlogic.compiler.runtime.program import Program
from tensorlogic.compiler.trace.exporter import trace
from tensorlogic.compiler.trace.traced_graph import Trace
from tensorlogic.compiler.tune import stream_parallelism as tune_stream_parallelism
from tensorlogic.cuda_graphs import replay as cuda_graphs_replay
from tensorlogic.measure import timer

from ...support.clockwork import Clock


class Towers(nn.Module):
    """Two, or more, that meet at the end."""

    def __init__(self, count: int = 2) -> None:
        super().__init__()
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([t(x) for t in self.towers]).sum(0).tanh()


class Heads(nn.Module):
    """Queries, keys and values by products of their own, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for i in (0, 3):
            q, k, v = (f(x).view(2, 3, 2, 4).transpose(1, 2) for f in self.layers[i : i + 3])
            x = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, 8)
        return x


class Inception(nn.Module):
    """Convolutions of three sizes beside pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, k, padding=k // 2) for k in (1, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        both = torch.relu(self.b(torch.relu(self.a(x))))
        return torch.cat([self.a(x), both, self.c(x), F.max_pool2d(x, 3, 1, 1)], 1)


def traced(model: nn.Module, x: Tensor) -> Trace:
    return trace(model.eval(), (x,), {})


def found_in(model: nn.Module, x: Tensor) -> list[Section]:
    return sections([n for n in traced(model, x).graph.nodes if n.op == "call_function"])


def test_towers_are_one_section() -> None:
    (section,) = found_in(Towers(), torch.randn(2, 8))
    assert section.gain == 3
    assert section.lanes == (("linear", "relu", "linear_1"), ("linear_2", "relu_1", "linear_3"))


def test_more_branches_than_streams_share_them() -> None:
    (section,) = found_in(Towers(6), torch.randn(2, 8))
    assert len(section.lanes) == LANES
    assert sorted(map(len, section.lanes)) == [3, 3, 6, 6]
    assert section.gain == 15


def test_projections_of_every_layer_are_a_section_of_one_kind() -> None:
    found = found_in(Heads(), torch.randn(2, 3, 8))
    assert [s.gain for s in found] == [2, 2]
    assert [len(s.lanes) for s in found] == [3, 3]
    assert found[0].kind == found[1].kind
    assert "scaled_dot_product_attention" not in found[0].calls


def test_branches_of_different_length() -> None:
    (section,) = found_in(Inception(), torch.randn(1, 4, 6, 6))
    assert section.gain == 3
    assert len(section.lanes[0]) == 4  # two convolutions, each with its ReLU


def test_a_chain_and_views_have_no_branches() -> None:
    chain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    assert not found_in(chain, torch.randn(2, 8))

    class Views(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.t() @ x.view(2, 8)

    assert not found_in(Views(), torch.randn(2, 8))


@pytest.mark.parametrize("between", ["writes", "draws"])
def test_nothing_moves_across_what_writes_or_draws(between: str) -> None:
    class Between(Towers):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("kept", torch.zeros(8))

        def forward(self, x: Tensor) -> Tensor:
            a = torch.sin(self.towers[0][0](x))
            if between == "writes":
                self.kept.add_(1)
            else:
                a = a + torch.rand(8)
            return a + torch.cos(self.towers[1][0](x))

    for section in found_in(Between(), torch.randn(2, 8)):
        assert not section.calls & {"add_", "rand"}
        assert not ({"linear", "linear_1"} <= section.calls)


class Noted:
    """Stands for streams: notes what is asked of it, and that nothing of a section is freed before its join."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.made: list[weakref.ref[Tensor]] = []

    def fork(self) -> None:
        self.steps.append("fork")
        self.made.clear()

    def enter(self, lane: int) -> None:
        self.steps.append(lane)

    def join(self) -> None:
        self.steps.append("join")
        assert self.made
        assert all(ref() is not None for ref in self.made)


@torch.no_grad()
@pytest.mark.parametrize(
    ("model", "shape", "steps"),
    [
        (Towers(), (2, 8), ["fork", 1, 0, "join"]),
        (Heads(), (2, 3, 8), ["fork", 1, 2, 0, "join"] * 2),
        (Inception(), (1, 4, 6, 6), ["fork", 1, 2, 3, 0, "join"]),
    ],
)
def test_the_forked_function_computes_the_same(
    model: nn.Module, shape: tuple[int, ...], steps: list[Any]
) -> None:
    x = torch.randn(shape)
    made = traced(model, x)
    nodes = [n for n in made.graph.nodes if n.op == "call_function"]
    state = {n: t for n, (_, t) in made.state.items()}
    function = Function(nodes, made.inputs, made.graph.output_node().args[0], state)
    function.run(x)
    found, noted = sections(nodes), Noted()
    calls = frozenset(name for s in found for name in s.calls)
    run = function.forked(found, noted)

    def seen(call: Any, *args: Any, **kwargs: Any) -> Any:
        out = call(*args, **kwargs)
        noted.made.append(weakref.ref(out))
        return out

    for name in {f"f_{name}" for name in calls} & function.scope.keys():
        function.scope[name] = functools.partial(seen, function.scope[name])
    (got,) = run(x)
    assert noted.steps == steps
    assert got.equal(model(x))
    function.set("p_weight_of_nobody", torch.zeros(1))  # others are read where they are read now
    name = next(n for n in state if "weight" in n)
    function.set(name, torch.zeros_like(state[name]))
    assert not run(x)[0].equal(got)


CLOCK = Clock()


class Recorded:
    """Stands for a captured graph of a known duration and output."""

    def __init__(self, seconds: float, out: Tensor) -> None:
        self.seconds, self.out = seconds, out
        self.tape = SimpleNamespace(replay=lambda: CLOCK.sleep(seconds))

    def __call__(self, flat: Any) -> list[Tensor]:
        return [self.out.clone()]


def captured(model: nn.Module, x: Tensor, monkeypatch: pytest.MonkeyPatch, replay: Any) -> Program:
    """A program that seems to be captured; what is recorded anew is `replay(its sections)`."""
    CLOCK.stands_in(monkeypatch, timer)
    made = traced(model, x)
    program = Program(made, made.graph, {}, False, model)
    program.replay = Recorded(0.002, torch.ones(2))
    monkeypatch.setattr(program, "recorded", lambda flat: replay(program.sections))
    return program


@torch.no_grad()
def test_branches_are_kept_where_they_are_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    program = captured(
        Towers(), torch.randn(2, 8), monkeypatch, lambda _: Recorded(0.0005, torch.ones(2))
    )
    tune_stream_parallelism.spread(program, report := Report())
    (row,) = report.rows
    assert (row.op, row.candidate, row.count, row.refused) == ("streams", "2 streams", 1, "")
    assert row.ratio is not None
    assert row.ratio == pytest.approx((0.25, 0.25, 0.25))
    assert program.replay.seconds == 0.0005
    assert len(program.sections) == 1


class Rerun:
    """A tape that computes again where a graph would be replayed."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self.launched = 0

    def record(self, fn: Any) -> Any:
        self.fn, self.out = fn, fn()
        return self.out

    def replay(self) -> None:
        self.launched += 1
        for kept, now in zip(self.out, self.fn(), strict=True):
            kept.copy_(now)


@torch.no_grad()
def test_calls_that_were_served_by_one_stream_are_served_by_several(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        runtime_program, "Replay", functools.partial(cuda_graphs_replay.Replay, tape=Rerun)
    )
    monkeypatch.setattr(
        runtime_program, "streams", lambda _: SimpleNamespace(fork=int, enter=int, join=int)
    )
    samples = timer.Samples({"one": [2.0] * 8, "many": [1.0] * 8})
    monkeypatch.setattr(timer, "wall_samples", lambda *_: samples)
    model, x = Towers(), torch.randn(2, 8)
    made = traced(model, x)
    program = Program(made, made.graph, {}, False, model)
    program.replay, program.pointers = program.recorded([x]), program._where()
    for _ in range(3):  # the last ones go the short way
        assert program((x,), {}).equal(model(x))
    one = program.replay.tape
    assert one.launched == 3
    tune_stream_parallelism.spread(program, Report())
    many = program.replay.tape
    assert program.sections
    assert many is not one
    before = one.launched, many.launched
    for _ in range(3):
        y = torch.randn(2, 8)
        assert program((y,), {}).equal(model(y))
    assert (one.launched, many.launched) == (before[0], before[1] + 3)


@torch.no_grad()
@pytest.mark.parametrize("fault", ["slower", "differs", "fails"])
def test_branches_are_undone_with_the_reason(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def replay(_: Any) -> Recorded:
        if fault == "fails":
            raise RuntimeError("no stream")
        out = torch.zeros(2) if fault == "differs" else torch.ones(2)
        return Recorded(0.006 if fault == "slower" else 0.0001, out)

    program = captured(Towers(), torch.randn(2, 8), monkeypatch, replay)
    before = program.replay
    tune_stream_parallelism.spread(program, report := Report())
    words = {"slower": "does not pay", "differs": "outputs differ", "fails": "no stream"}
    assert words[fault] in report.rows[0].refused
    assert program.replay is before
    assert not program.sections


@torch.no_grad()
def test_the_kind_that_should_save_most_is_tried_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Towers(2), Towers(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x))

    asked = []

    def replay(found: list[Section]) -> Recorded:
        asked.append([s.gain for s in found])
        return Recorded(0.006 if len(found) == 2 else 0.0005, torch.ones(2))

    program = captured(Both(), torch.randn(2, 8), monkeypatch, replay)
    tune_stream_parallelism.spread(program, report := Report())
    assert asked == [[3, 6], [6]]
    assert not report.rows[0].refused
    lanes = [[list(lane) for lane in s.lanes] for s in program.sections]  # as JSON gives it back
    later = captured(Both(), torch.randn(2, 8), monkeypatch, replay)
    tune_stream_parallelism.again(later, lanes)
    assert [s.gain for s in later.sections] == [6]
    tune_stream_parallelism.again(program, [])
    assert not program.sections
