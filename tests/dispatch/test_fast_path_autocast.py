"""Calls under autocast, and registered ops, that become warm."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.core import policy
from tensorlogic.core.op import Op
from tensorlogic.dispatch import bound_call


@pytest.mark.parametrize("grad", [False, True])
def test_calls_under_autocast_become_warm_and_follow_its_dtype(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, bias = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)
    weight.requires_grad_(grad)

    def call() -> torch.Tensor:
        return tensorlogic.linear(x, weight, bias, activation="relu")

    misses: list[str] = []
    chosen = bound_call.Bound

    def counted(op: Op, *args: Any, **kwargs: Any) -> Any:
        misses.append(op.name)
        return chosen(op, *args, **kwargs)

    with torch.set_grad_enabled(grad):
        plain = call()
        for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
            with torch.autocast("cpu", dtype=dtype):
                expected = torch.relu(torch.nn.functional.linear(x, weight, bias))
                first = call()
                with monkeypatch.context() as patch:
                    patch.setattr(bound_call, "Bound", counted)
                    again = call()
                assert torch.is_autocast_enabled("cpu")
            for out in (first, again):
                assert out.dtype == expected.dtype == dtype
                torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
                assert out.requires_grad == grad
            if grad:
                again.sum().backward()
                assert weight.grad is not None
                assert weight.grad.dtype == torch.float32
        assert misses == []
        assert torch.equal(call(), plain)


def test_a_registered_op_is_bound_once_for_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[str] = []
    chosen = bound_call.Bound

    def counted(op: Op, *args: Any, **kwargs: Any) -> Any:
        bound.append(op.name)
        return chosen(op, *args, **kwargs)

    monkeypatch.setattr(bound_call, "Bound", counted)
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    for _ in range(3):
        assert torch.equal(torch.ops.tensorlogic.add_relu(x, y, False), torch.relu(x + y))
    assert bound == ["add_relu"]
    torch.ops.tensorlogic.add_relu(x.t(), y.t(), False)
    torch.ops.tensorlogic.add_relu(x.half(), y.half(), False)
    assert len(bound) == 3
    policy.forget_entries()  # plans have changed: it is chosen anew
    torch.ops.tensorlogic.add_relu(x, y, False)
    assert len(bound) == 4


def test_a_warm_call_under_autocast_keeps_no_tensor_alive() -> None:
    x, weight = torch.randn(5, 7), torch.randn(3, 7)
    gone = weakref.ref(x)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        tensorlogic.linear(x, weight)
        tensorlogic.linear(x, weight)
    del x
    assert gone() is None
