"""Gradients of element-wise ops on a CPU: whoever may serve them is right, and serves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tensorlogic
from tensorlogic.ops.pointwise.definitions import pointwise_backward

CALLS = {
    "sub": 2, "mul": 2, "div": 2, "relu": 1, "silu": 1, "gelu": 1, "add_relu": 2, "mul_relu": 2, "affine": 3,
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_no_candidate_fails(name: str, dtype: torch.dtype) -> None:
    """A candidate that says it can and raises is refused in silence, and PyTorch's serves for good."""
    args = [torch.randn(7, 33, dtype=dtype).requires_grad_() for _ in range(CALLS[name])]
    learned = tensorlogic.tune(getattr(tensorlogic, name), *args)
    refused = {
        (plan.key.text, e.candidate): e.reason
        for plan in learned.plans
        for e in plan.evidence
        if e.status == "refused" and not e.candidate.startswith("triton.")
    }
    assert learned.plans
    assert not [r for r in refused.values() if r.startswith(("failed", "wrong"))], refused
    backward = [plan for plan in learned.plans if plan.key.direction == "backward"]
    for plan in backward:
        ours = next(e for e in plan.evidence if e.candidate == "cpu.fused")
        assert ours.status == "measured"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_gradient_of_a_difference(dtype: torch.dtype) -> None:
    a, b = (torch.randn(7, 33, dtype=dtype).requires_grad_() for _ in range(2))
    dy = torch.randn(7, 33, dtype=dtype)
    with tensorlogic.policy(force={"pointwise_backward": "cpu.fused"}):
        da, db = torch.autograd.grad(tensorlogic.sub(a, b), (a, b), dy)
    assert torch.equal(da, dy)
    assert torch.equal(db, -dy)


class Computed(TorchDispatchMode):
    """Names of the native ops that were called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("kind", "computed"),
    [("mul", ["mul"]), ("div", ["div"]), ("mul_relu", ["threshold_backward", "mul"])],
)
def test_a_gradient_nobody_asked_for_is_not_computed(kind: str, computed: list[str]) -> None:
    """Its operand may be a stand-in that nobody wrote to."""
    dy, a, b, y = (torch.randn(4, 3) for _ in range(4))
    with Computed() as met:
        pointwise_backward(dy, a, b, None, y if "relu" in kind else None, kind, "100")
    assert met.names == computed
