"""What floating tensors are by default is the program's affair: no candidate's result, and no refusal, depends on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic import dispatch, tuning
from tensorlogic.bench import rows
from tensorlogic.checking import Checker
from tensorlogic.op import EAGER, OPS

from .helpers import PUBLIC, cases


@pytest.fixture(params=[torch.float64, torch.float16], ids=str)
def default(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    yield request.param
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", PUBLIC)
def test_no_candidate_is_refused_for_it(name: str, default: torch.dtype) -> None:
    op = OPS[name]
    kinds = {tuple(a for a in case if not isinstance(a, Tensor)): case for case in cases(op, torch.float32)}  # fmt: skip
    torch.set_default_dtype(default)

    def step(*case: object) -> None:
        leaves = [a.detach().requires_grad_(a.is_floating_point()) if isinstance(a, Tensor) else a for a in case]  # fmt: skip
        tuning._backward(dispatch.call(op, leaves))

    for case in kinds.values():
        for its, key, device in rows.meet(step, tuple(case)):
            checker = Checker(its, key, device)
            for c in its.candidates.values():
                if c.id == EAGER or c.id.startswith("triton.") or c.unfit(key):
                    continue
                with torch.no_grad():
                    verdict = checker.check(c.bind(key, c.configs(key)[0], device))
                assert verdict, f"{c.id} on {key.text}: {verdict.reason}"


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_what_a_loss_keeps_is_float32(reduction: str, default: torch.dtype) -> None:
    logits, target = torch.randn(7, 13).half(), torch.arange(7)
    torch.set_default_dtype(default)
    args = (logits, target, -100, 0.0, reduction, True)
    for id in (EAGER, "cpu.fused"):
        with tensorlogic.policy(force=id):
            outs = torch.ops.tensorlogic.softmax_cross_entropy(*args)
        assert [o.dtype for o in outs] == [torch.float16, torch.float32, torch.float32], id
