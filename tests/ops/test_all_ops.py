"""Every op, candidate, case and dtype against float64: outputs, gradients, and the registered op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import tolerance
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import dispatcher
from tensorlogic.system import hardware

from ..support.helpers import FLOATS, PUBLIC, call, cases, cast, eager, full, reference, runnable

INTERPRETED = hardware.interpreting()
PAIRS = [(name, id) for name in PUBLIC for id in OPS[name].candidates]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "id"), PAIRS)
def test_forward_matches_float64(name: str, id: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    ran = 0
    if INTERPRETED and id.startswith("triton.") and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bfloat16 toward zero and multiplies it wrongly")
    for case in cases(op, dtype):
        if not runnable(op, case, id) or (op.baseline and id == EAGER):
            continue
        before = [a.clone() if isinstance(a, Tensor) else a for a in case]
        with torch.no_grad():
            out = call(
                op,
                [
                    a.clone() if p.name in op.mutates and a is not None else a
                    for p, a in zip(op.params, case, strict=False)
                ],
                id,
            )
            verdict = tolerance.judge((out,), (eager(op, case),), (reference(op, case),))
        assert verdict, f"{name} {id}: {verdict.reason}"
        for p, b, a in zip(op.params, before, case, strict=False):
            if isinstance(a, Tensor) and p.name not in op.mutates:
                assert torch.equal(a, b), f"{id} changed its input {p.name}"
        ran += 1
    if not ran:
        pytest.skip("no case that this candidate serves here")


def gradient_case(name: str, dtype: torch.dtype) -> list[list[Any]]:
    op = OPS[name]
    return [
        c
        for c in cases(op, dtype)
        if any(isinstance(a, Tensor) and a.is_floating_point() for a in c)
    ]


def leaves(op: Any, case: list[Any]) -> list[Any]:
    skip = (*op.mutates, "state")
    return [
        a.detach().clone().requires_grad_()
        if isinstance(a, Tensor) and a.is_floating_point() and p.name not in skip
        else a.clone()
        if isinstance(a, Tensor)
        else a
        for p, a in zip(op.params, case, strict=False)
    ]


def grads(out: Tensor, inputs: list[Any], dy: Tensor) -> list[Tensor | None]:
    wanted = [a for a in inputs if isinstance(a, Tensor) and a.requires_grad]
    return list(torch.autograd.grad(out, wanted, dy, allow_unused=True))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("name", "id"), PAIRS)
def test_gradients_match_float64(name: str, id: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    if INTERPRETED and id.startswith("triton.") and dtype is torch.bfloat16:
        pytest.skip("Triton's interpreter rounds bfloat16 toward zero and multiplies it wrongly")
    slow = INTERPRETED and id.startswith("triton.") and dtype is torch.float16
    for case in gradient_case(name, dtype)[:: 2 if slow else 1]:  # float32 has met all of them
        if not runnable(op, case, id, save=True) or (op.baseline and id == EAGER):
            continue
        mine = leaves(op, case)
        out = call(op, mine, id)
        wide = leaves(op, cast(case, torch.float64))
        precise = op.reference(*full(op, wide, True))[0]
        dy = torch.randn(out.shape).to(out)
        dy[(out > 0) != (precise > 0)] = (
            0  # what rounds to either side of 0 may have either gradient
        )
        got = grads(out, mine, dy)
        ref = grads(precise, wide, dy.double())
        plain = leaves(op, case)
        base = grads((op.baseline or op.reference)(*full(op, plain, True))[0], plain, dy)
        verdict = tolerance.judge(got, base, [None if r is None else r for r in ref])
        if op.name in ("max", "min") and dtype is not torch.float32:
            continue  # ties differ between precisions
        chained = max(
            tolerance.relative_error(g, r)
            for g, r in zip(got, ref, strict=True)
            if g is not None and r is not None
        )
        close = (
            dtype is torch.float32 and chained < 1e-5
        )  # two kernels' roundings add up where eager's cancel
        assert verdict or close, f"{name} {id} gradient: {verdict.reason}"


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLIC)
def test_registered_op_passes_opcheck(name: str) -> None:
    op = OPS[name]
    kernel = getattr(torch.ops.tensorlogic, name).default
    for case in cases(op, torch.float32)[:4]:
        if op.functional is not None:
            case = list(op.functional(tuple(case)))
        for save in (False, True) if op.gradient else (False,):
            args = full(op, case, save)
            if save:
                args = [*leaves(op, case), save]
            torch.library.opcheck(
                kernel,
                tuple(args),
                test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
            )


@pytest.fixture(scope="module")
def compiler() -> None:
    """Loaded: the first graph of a process takes two seconds."""
    torch.compile(torch.neg, backend="aot_eager")(torch.ones(1))


@pytest.mark.parametrize("name", PUBLIC)
def test_compiled_call_equals_eager_call(name: str, compiler: None) -> None:
    op = OPS[name]
    if op.baseline is not None:
        pytest.skip("draws random numbers; see test_dropout")
    for case in cases(op, torch.float32)[:3]:
        mine, theirs = leaves(op, case), leaves(op, case)
        out = call(op, mine, EAGER)
        dy = torch.randn_like(out)
        public = getattr(tensorlogic, name)
        torch._dynamo.reset()
        fn = torch.compile(
            lambda *args, public=public: public(*args), backend="aot_eager", fullgraph=True
        )
        if name == "softmax_cross_entropy" and case[0].dim() > 2:
            continue  # the public function takes classes second
        compiled = fn(*theirs)
        torch.testing.assert_close(compiled, out)
        for a, b in zip(grads(compiled, theirs, dy), grads(out, mine, dy), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PUBLIC)
def test_gradcheck_of_reference(name: str) -> None:
    op = OPS[name]
    case = leaves(op, cast(cases(op, torch.float32)[0], torch.float64))
    inputs = [a for a in case if isinstance(a, Tensor) and a.requires_grad]
    if name in ("max", "min", "relu", "add_relu", "mul_relu"):
        inputs = [a.detach().mul(10).requires_grad_() for a in inputs]

    def run(*given: Tensor) -> Tensor:
        rest = iter(given)
        args = [next(rest) if isinstance(a, Tensor) and a.requires_grad else a for a in case]
        return (
            dispatcher.composition(op, args)
            if op.baseline is None
            else op.reference(*full(op, args, True))[0]
        )

    assert torch.autograd.gradcheck(run, inputs, eps=1e-6, atol=1e-6)
