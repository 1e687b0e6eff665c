"""NaN and infinities go through every candidate and every way as they go through PyTorch, whatever is fused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.compiler.rewrite.rule_set import WAYS
from tensorlogic.core.op import OPS
from tensorlogic.ops.attention_scores import backward_call, masked
from tensorlogic.ops.convolution import CONVOLUTION
from tensorlogic.ops.linear import linear

from ..support.helpers import by_way

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def odd(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers, of which the first rows have one NaN, one infinity and one negative infinity."""
    x = torch.randn(shape)
    for row, value in enumerate((float("nan"), float("inf"), -float("inf"))):
        x[row].view(-1)[5] = value
    return x.to(dtype)


def assert_alike(got: Tensor, want: Tensor, words: str) -> None:
    """NaN and infinities where PyTorch has them; of smooth activations, whose limits PyTorch misses, NaN from NaN."""
    if "gelu" in words or "silu" in words:
        got, want = got[0], want[0]
    assert torch.equal(got.isnan(), want.isnan()), f"{words}: NaN elsewhere"
    assert torch.equal(got.isinf(), want.isinf()), f"{words}: infinities elsewhere"


def calls(dtype: torch.dtype) -> dict[str, tuple[str, Callable[[], Tensor]]]:
    x, w, b = odd(32, 64, dtype=dtype), torch.rand(48, 64).to(dtype), torch.randn(48).to(dtype)
    r, t = torch.randn(32, 48).to(dtype), w.t().contiguous()
    found: dict[str, tuple[str, Callable[[], Tensor]]] = {
        "residual": (
            "linear_residual_relu",
            lambda: tensorlogic.linear_residual_relu(x, w, b, r),
        ),
        "add_relu": ("add_relu", lambda: tensorlogic.add_relu(x, x)),
        "relu": ("relu", lambda: tensorlogic.relu(x)),
    }
    for name in ACTIVATIONS:
        found[f"linear {name}"] = "linear", lambda n=name: tensorlogic.linear(x, w, b, None, n)
        found[f"bare {name}"] = "linear", lambda n=name: tensorlogic.linear(x, w, None, None, n)
        found[f"added {name}"] = "linear", lambda n=name: tensorlogic.linear(x, w, b, r, n)
        found[f"matmul {name}"] = "matmul", lambda n=name: tensorlogic.matmul(x, t, n)
    return found


@torch.no_grad()
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
def test_every_candidate_of_products(dtype: torch.dtype) -> None:
    tensorlogic.relu(torch.zeros(1))  # registers what this type of device has
    for name, (op, call) in calls(dtype).items():
        known = op if op in OPS else "linear"
        with tensorlogic.policy(force="torch.eager"):
            want = call()
        for candidate in OPS[known].candidates:
            with tensorlogic.policy(force=candidate):
                assert_alike(call(), want, f"{name} by {candidate}")


@torch.no_grad()
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("added", [False, True])
def test_every_way_of_a_convolution(kernel: int, added: bool) -> None:
    x, w, b = odd(4, 8, 6, 6), torch.randn(16, 8, kernel, kernel), torch.randn(16)
    how = ((1, 1), (kernel // 2, kernel // 2), (1, 1), 1)
    r = torch.randn(4, 16, 6, 6) if added else None
    for activation in ("none", "relu"):
        args = (x, w, b, r, activation, *how)
        want = CONVOLUTION(*args)
        for way in CONVOLUTION.ways:
            if way.supports(args) is None:
                assert_alike(by_way(way.emit, args), want, f"{way.id} {activation}")


@torch.no_grad()
def test_every_way_of_a_linear_layer() -> None:
    x, w, b = odd(32, 64), torch.rand(48, 64), torch.randn(48)
    for activation in ACTIVATIONS:
        for r in (None, torch.randn(32, 48)):
            with tensorlogic.policy(force="torch.eager"):
                want = tensorlogic.linear(x, w, b, r, activation)
            for way in WAYS[linear]:
                if way.supports((x, w, b, r, activation)) is None:
                    got = by_way(way.emit, (x, w, b, r, activation))
                    assert_alike(got, want, f"{way.id} {activation}")


def test_gradients_behind_a_norm_with_nan_are_not_hidden() -> None:
    """A scaler that looks for what is not finite in the gradients must find it."""
    x, w = torch.randn(8, 5).half(), torch.randn(3, 5).half()
    x[2, 1] = float("nan")
    found = []
    for candidate in ("torch.inplace", "torch.eager"):
        leaves = [t.clone().requires_grad_() for t in (x, w, torch.zeros(3).half())]
        with tensorlogic.policy(force=candidate):
            y = tensorlogic.linear_batch_norm_relu(
                *leaves, torch.zeros(3).half(), torch.ones(3).half(), None, None
            )
        found.append(torch.autograd.grad(y, leaves, torch.full_like(y, float("nan"))))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.isfinite(), want.isfinite())
        assert not got.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("place", ["q", "k", "dy"])
@pytest.mark.parametrize("hides", ["mask", "causal", "both"])
def test_no_gradient_through_hidden_scores(dtype: torch.dtype, place: str, hides: str) -> None:
    """One NaN makes its row of scores NaN, and yet nothing of it reaches the keys that the row does not see."""
    backward = OPS["attention_scores_backward"]
    q, k, dy = torch.randn(2, 6, 8), torch.randn(2, 6, 8), torch.randn(2, 6, 6)
    {"q": q, "k": k, "dy": dy}[place][1, 3, 2] = float("nan")
    q, k, dy = (t.to(dtype) for t in (q, k, dy))
    mask = torch.rand(6, 6) > 0.5 if hides != "causal" else None
    if mask is not None:
        mask[0], mask[3, :4] = False, torch.tensor([True, False, True, False])
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    causal = hides != "mask"
    scores = masked(leaves[0] @ leaves[1].mT, 0.5, mask, causal)
    y = torch.softmax(scores, -1)
    wanted = torch.autograd.grad(y, leaves, dy)
    ours = tensorlogic.attention_scores(*leaves, 0.5, mask, causal)
    found = {"public": torch.autograd.grad(ours, leaves, dy)}
    for id in backward.candidates:
        with tensorlogic.policy(force=id):
            found[id] = backward_call(dy, q, k, y.detach(), 0.5, mask, causal, "110")[:2]
    assert any(w.isnan().any() for w in wanted)
    assert not all(w.isnan().all() for w in wanted)
    for id, grads in found.items():
        for got, want in zip(grads, wanted, strict=True):
            assert torch.equal(got.isnan(), want.isnan()), id
            torch.testing.assert_close(got, want, equal_nan=True, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_a_mask_adds_to_hidden_scores_shows_nowhere(value: float) -> None:
    """The causal end is set after the mask is added, by every candidate."""
    op = OPS["attention_scores"]
    q, k, mask = torch.randn(2, 5, 8), torch.randn(2, 7, 8), torch.zeros(5, 7)
    mask[1, 3] = mask[0, 6] = value
    seen = torch.ones(5, 7, dtype=torch.bool).tril()
    wanted = torch.softmax((0.5 * q @ k.mT).masked_fill(~seen, -float("inf")), -1)
    served = 0
    for id, candidate in [*op.candidates.items()]:
        if candidate.unfit(op.key((q, k, 0.5, mask, True, False), "inference")) is None:
            with tensorlogic.policy(force=id):
                torch.testing.assert_close(tensorlogic.attention_scores(q, k, 0.5, mask, True), wanted, msg=id)  # fmt: skip
            served += 1
    assert served >= 3
