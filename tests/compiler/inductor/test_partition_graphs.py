"""Graphs cut into runs for Inductor: of any form, never waiting for themselves, refusing results and inputs that lie otherwise."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import tensorlogic
from tensorlogic.compiler.inductor import compile_process, partition
from tensorlogic.compiler.runtime.program import Program
from tensorlogic.compiler.trace import compiled_call
from tensorlogic.ops.linear import linear
from tests.support.inductor_fakes import DEVICE, Fake, program_of

from ...support.inductor_fakes import (
    left,
    same,
    tails,
    x,
)
from ...support.inductor_fakes import ours as ours  # a fixture


def by_itself(program: Program, tmp_path: Path) -> Program:
    """The program with every run in the place of its calls, run as it travelled."""
    found = partition.kinds(program, tmp_path / "a.artifact")
    for kind in found:
        packed = compile_process._unpacked(compile_process._packed(kind.order().graph))
        kind.made = compiled_call.Compiled(fx.GraphModule(nn.Module(), packed), False)
    return partition.woven(program, found)


class Around(nn.Module):
    """What a run must not hold: a product between two calls of which one feeds the other past it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(x)
        z = torch.cos(y)
        return torch.exp(self.a(y)) * z + y


@torch.no_grad()
def test_a_run_never_waits_for_itself(tmp_path: Path) -> None:
    model, given = Around().to(DEVICE).eval(), x()
    program = program_of(model, given)
    found = [sorted(str(c.target) for c in r.calls) for r in partition.runs(program)]
    assert found == [
        ["aten.cos.default", "aten.sin.default"],
        ["aten.add.Tensor", "aten.exp.default", "aten.mul.Tensor"],
    ]
    same(by_itself(program, tmp_path).serving(given), model(given))


class Random(nn.Module):
    """Products, element-wise calls, views and reductions in any order, with values read again much later."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        draw, layers = random.Random(self.seed), iter(self.layers)
        known = [x]
        for _ in range(24):
            a, b = draw.choice(known[-4:]), draw.choice(known)
            what = draw.randrange(8)
            if what == 0 and (layer := next(layers, None)) is not None:
                known.append(layer(a))
            elif what == 1:
                left, right = torch.sin(a).split(16, -1)
                known.append(torch.cat([right, left], -1))
            elif what == 2:
                known.append(a.view(-1, 4, 8).transpose(1, 2).reshape(-1, 32) + b)
            elif what == 3:
                known.append(F.layer_norm(a, (32,)))
            elif what == 4:
                known.append(torch.relu(a + b))
            elif what == 5:
                known.append(torch.softmax(a, -1) * b.mean(-1, keepdim=True))
            else:
                known.append(torch.tanh(a) * b)
        return known[-1], known[len(known) // 2]


@torch.no_grad()
@pytest.mark.parametrize("seed", range(12))
def test_graphs_of_any_form_are_the_same_with_their_runs_compiled(
    seed: int, tmp_path: Path
) -> None:
    model, given = Random(seed).to(DEVICE).eval(), x(8)
    program = program_of(model, given)
    made = by_itself(program, tmp_path)
    assert made.left_over
    same(made.serving(given), model(given))
    program.graph.eliminate_dead_code()  # what no output needs
    products = [sum(n.target is linear for n in p.graph.nodes) for p in (program, made)]
    assert products[0] == products[1]


@torch.no_grad()
def test_results_that_lie_otherwise_are_refused(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows may be compiled for the strides that the program's own calls give."""
    fake.left_us, fake.us = 4.0, 9.0
    plain = Fake.run

    def turned(self: Fake, artifact: Path, flat: Any) -> Any:
        outs = plain(self, artifact, flat)
        return [v.t().contiguous().t() if "-" in artifact.stem else v for v in outs]

    monkeypatch.setattr(Fake, "run", turned)
    model, given = tails(), x()
    fast = tensorlogic.optimize(model, given, budget_s=30)
    assert left(fast.report)
    assert all(r.refused and "lie in memory" in r.refused for r in left(fast.report))
    same(fast(given), model(given))


def test_what_refuses_its_inputs_says_so() -> None:
    def strict(*given: Any) -> Any:
        raise AssertionError("expected stride 1")

    with pytest.raises(RuntimeError, match=r"compiled by Inductor.*expected stride 1"):
        compiled_call.Compiled(strict, False)(torch.ones(1))
