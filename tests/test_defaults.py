"""What new tensors are by default, dtype and device, is the program's affair: no result, and no refusal, depends on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """New tensors lie on another device unless told otherwise; this one holds no data, so that using one shows."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def _dropped(x: Tensor, b: Tensor) -> Tensor:
    return tensorlogic.dropout_linear(x, x, None, p=0.5)


@pytest.mark.parametrize(
    "call",
    [
        lambda x, b: tensorlogic.affine(x, 2.0, b),
        lambda x, b: tensorlogic.affine(b, 2, 1.5),  # no dimensions: promoted as numbers are
        lambda x, b: tensorlogic.add_relu(x, -1),
        lambda x, b: tensorlogic.softmax_cross_entropy(x, b.long().expand(8), reduction="none"),
        _dropped,
    ],
)
def test_nothing_of_ours_goes_where_new_tensors_go(
    call: Callable[[Tensor, Tensor], Tensor], elsewhere: None
) -> None:
    x, b = torch.ones(8, 8, device="cpu"), torch.ones((), device="cpu")
    torch.manual_seed(3)
    out = call(x.requires_grad_(), b.requires_grad_())
    out.backward(torch.ones_like(out))
    assert out.device.type == "cpu"
    torch.set_default_device(None)
    torch.manual_seed(3)
    if call is not _dropped:  # the registered op draws its seed otherwise
        assert torch.equal(out, call(x, b))
