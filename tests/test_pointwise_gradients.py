"""Gradients of element-wise ops on a CPU: whoever may serve them is right, and serves them."""

from __future__ import annotations

import pytest
import torch

import tensorlogic

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
