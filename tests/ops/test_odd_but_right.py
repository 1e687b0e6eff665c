"""What PyTorch allows that is easy to forget, with PyTorch's result; inputs stay as they were."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tensorlogic as t

from ..support.helpers import LOGITS, MEAN, TARGET, VAR, B, G, H, K, Q, W, X, bn, ce, scores

HUGE = torch.ones(1, 1).expand(1 << 14, 1 << 14)  # 1 GiB if it were written out


INFERENCE = torch.inference_mode()(lambda: torch.randn(3, 4))()


ODD_MEMORY = torch.randn(13)[1:].view(3, 4)


# ours, PyTorch's
RIGHT: dict[str, tuple[Callable[[], Tensor], Callable[[], Tensor]]] = {
    "int operand": (lambda: t.add(X, 2), lambda: X + 2),
    "float operand first": (lambda: t.sub(1.5, X), lambda: 1.5 - X),
    "NaN operand": (lambda: t.mul(X, math.nan), lambda: X * math.nan),
    "bool operand": (lambda: t.mul(X, True), lambda: X * True),
    "complex operand": (lambda: t.add(X.double(), 2j), lambda: X.double() + 2j),
    "uint8 and a big int": (lambda: t.add(TARGET.byte(), 300), lambda: TARGET.byte() + 300),
    "integers divided": (lambda: t.div(TARGET, 2), lambda: TARGET / 2),
    "division by zero": (lambda: t.div(X, 0), lambda: X / 0),
    "booleans added": (lambda: t.add(X > 0, X < 0), lambda: (X > 0) + (X < 0)),
    "promotion": (lambda: t.add(X.half(), X), lambda: X.half() + X),
    "promotion of a scalar tensor": (
        lambda: t.mul(X.half(), torch.tensor(2.5)),
        lambda: X.half() * torch.tensor(2.5),
    ),
    "numpy scalar": (lambda: t.add(X, np.float32(2)), lambda: X + np.float32(2)),
    "two numbers as tensors": (
        lambda: t.add(torch.tensor(1.5), torch.tensor(2)),
        lambda: torch.tensor(3.5),
    ),
    "half number and a number": (
        lambda: t.mul(X.half()[0, 0], 2.5),
        lambda: X.half()[0, 0] * 2.5,
    ),
    "integer number and a fraction": (lambda: t.add(TARGET[0], 2.5), lambda: TARGET[0] + 2.5),
    "number and numpy double": (lambda: t.sub(X[0, 0], np.float64(2)), lambda: X[0, 0] - 2.0),
    "integer affine": (lambda: t.affine(TARGET, 2, 1), lambda: TARGET * 2 + 1),
    "relu of integers": (lambda: t.relu(TARGET - 2), lambda: torch.relu(TARGET - 2)),
    "NaN and infinities": (
        lambda: t.relu(torch.tensor([math.nan, math.inf, -math.inf, -0.0])),
        lambda: torch.relu(torch.tensor([math.nan, math.inf, -math.inf, -0.0])),
    ),
    "add_relu of NaN": (lambda: t.add_relu(X, math.nan), lambda: torch.relu(X + math.nan)),
    "max of NaN": (lambda: t.max(X / X[0, 0] * math.nan), lambda: torch.amax(X * math.nan)),
    "sum of integers": (lambda: t.sum(TARGET.int()), lambda: torch.sum(TARGET.int())),
    "sum of booleans": (lambda: t.sum(X > 0, 0), lambda: torch.sum(X > 0, 0)),
    "sum of nothing": (lambda: t.sum(X[:0], 0), lambda: torch.sum(X[:0], 0)),
    "mean of nothing": (lambda: t.mean(X[:0]), lambda: torch.mean(X[:0])),
    "sum over no dims": (lambda: t.sum(X, ()), lambda: torch.sum(X, ())),
    "sum of a number": (lambda: t.sum(X[0, 0], 0), lambda: torch.sum(X[0, 0], 0)),
    "negative dim": (lambda: t.sum(X, -1, True), lambda: torch.sum(X, -1, True)),
    "dims of NumPy's": (
        lambda: t.softmax(t.sum(X[None], np.int64(0)), np.int64(1)),
        lambda: torch.softmax(X, 1),
    ),
    "list of dims": (lambda: t.mean(X, [0, -1]), lambda: torch.mean(X, [0, -1])),
    "softmax of a number": (lambda: t.softmax(X[0, 0], 0), lambda: torch.softmax(X[0, 0], 0)),
    "softmax to f64": (
        lambda: t.softmax(X.half(), dtype=torch.float64),
        lambda: torch.softmax(X.half(), -1, dtype=torch.float64),
    ),
    "softmax of integers to f32": (
        lambda: t.softmax(TARGET, 0, torch.float32),
        lambda: torch.softmax(TARGET, 0, dtype=torch.float32),
    ),
    "softmax of -inf": (lambda: t.softmax(X - math.inf), lambda: torch.softmax(X - math.inf, -1)),
    "empty product": (lambda: t.matmul(X[:, :0], W[:0]), lambda: X[:, :0] @ W[:0, :4]),
    "no rows": (lambda: t.linear(X[:0], W, B), lambda: F.linear(X[:0], W, B)),
    "no features": (
        lambda: t.linear(X[:, :0], W[:, :0], B),
        lambda: F.linear(X[:, :0], W[:, :0], B),
    ),
    "no outputs": (lambda: t.linear(X, W[:0], B[:0]), lambda: F.linear(X, W[:0], B[:0])),
    "vector": (lambda: t.linear(X[0], W, B), lambda: F.linear(X[0], W, B)),
    "vectors": (lambda: t.matmul(X[0], W[0]), lambda: X[0] @ W[0]),
    "zero stride": (
        lambda: t.linear(G.expand(3, 4), W, B[0].expand(5)),
        lambda: F.linear(G.expand(3, 4), W, B[0].expand(5)),
    ),
    "flipped": (
        lambda: t.linear(X.flip(0), W.flip(1), B),
        lambda: F.linear(X.flip(0), W.flip(1), B),
    ),
    "misaligned": (lambda: t.linear(ODD_MEMORY, W, B), lambda: F.linear(ODD_MEMORY, W, B)),
    "broadcast residual": (
        lambda: t.linear(X, W, B, torch.ones(1, 5)),
        lambda: F.linear(X, W, B) + torch.ones(1, 5),
    ),
    "float64": (lambda: t.linear(X.double(), W.double()), lambda: F.linear(X.double(), W.double())),
    "complex": (lambda: t.linear(X + 1j, W + 2j), lambda: F.linear(X + 1j, W + 2j)),
    "conjugated": (
        lambda: t.matmul((X + 1j).conj(), W.t() + 0j),
        lambda: (X + 1j).conj() @ (W.t() + 0j),
    ),
    "negated view": (lambda: t.add((X + 1j).conj().imag, X), lambda: (X + 1j).conj().imag + X),
    "sparse": (lambda: t.relu(X.to_sparse()).to_dense(), lambda: torch.relu(X)),
    "sparse matrix": (
        lambda: t.matmul(X.to_sparse(), W.t()).to_dense(),
        lambda: X @ W.t(),
    ),
    "inference tensor": (lambda: t.linear(INFERENCE, W, B), lambda: F.linear(INFERENCE, W, B)),
    "parameter": (
        lambda: t.linear(X, torch.nn.Parameter(W), torch.nn.Parameter(B)),
        lambda: F.linear(X, torch.nn.Parameter(W), torch.nn.Parameter(B)),
    ),
    "huge and unwritten": (lambda: t.max(HUGE, 0)[:2], lambda: torch.ones(2)),
    "one operand thrice": (lambda: t.affine(X, X, X), lambda: X * X + X),
    "same weight as x": (lambda: t.linear(W, W), lambda: F.linear(W, W)),
    "ints for numbers": (
        lambda: t.layer_norm_linear(X, None, None, W, None, 1),
        lambda: F.linear(F.layer_norm(X, (4,), eps=1), W),
    ),
    "numpy number": (
        lambda: scores(scale=np.float64(0.25)),
        lambda: torch.softmax(Q @ K.mT / 4, -1),
    ),
    "zero scale": (lambda: scores(scale=0), lambda: torch.full((2, 3, 5), 0.2)),
    "float mask of another dtype": (
        lambda: scores(Q.half(), K.half(), mask=torch.zeros(3, 5)),
        lambda: torch.softmax(Q.half() @ K.half().mT * 0.5, -1),
    ),
    "row that sees nothing": (
        lambda: scores(mask=torch.zeros(3, 5, dtype=torch.bool)),
        lambda: torch.full((2, 3, 5), math.nan),
    ),
    "dropout of nothing": (lambda: t.dropout_linear(X, W, B, 0), lambda: F.linear(X, W, B)),
    "dropout in evaluation": (
        lambda: t.dropout_linear(X, W, B, 0.9, False),
        lambda: F.linear(X, W, B),
    ),
    "dropout without rows": (lambda: t.dropout_linear(X[:0], W, B), lambda: F.linear(X[:0], W, B)),
    "one class index": (
        lambda: ce(LOGITS[0], TARGET[0]),
        lambda: F.cross_entropy(LOGITS[0], TARGET[0]),
    ),
    "images": (
        lambda: ce(torch.arange(48.0).view(2, 6, 4), torch.ones(2, 4).long(), reduction="none"),
        lambda: F.cross_entropy(
            torch.arange(48.0).view(2, 6, 4), torch.ones(2, 4).long(), reduction="none"
        ),
    ),
    "all ignored": (
        lambda: ce(target=torch.full((3,), 2), ignore_index=2),
        lambda: F.cross_entropy(LOGITS, torch.full((3,), 2), ignore_index=2),
    ),
    "no logits": (
        lambda: ce(LOGITS[:0], TARGET[:0], reduction="sum"),
        lambda: F.cross_entropy(LOGITS[:0], TARGET[:0], reduction="sum"),
    ),
    "infinite logit": (
        lambda: ce(LOGITS.index_fill(1, TARGET[:1], math.inf)),
        lambda: F.cross_entropy(LOGITS.index_fill(1, TARGET[:1], math.inf), TARGET),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("name", RIGHT)
def test_odd_but_right(name: str) -> None:
    """Value, dtype, shape, and whether gradients are recorded, cold and warm."""
    ours, theirs = RIGHT[name]
    want = theirs()
    for _ in range(3):
        got = ours()
        torch.testing.assert_close(got, want, equal_nan=True, rtol=2e-3, atol=2e-3)
        assert got.requires_grad == want.requires_grad


def test_gradients_of_integers_are_refused_as_pytorch_refuses_them() -> None:
    with pytest.raises(RuntimeError, match="floating point"):
        t.add(TARGET.requires_grad_(), 1)


def test_inputs_are_never_changed() -> None:
    given = [X, W, B, LOGITS, Q, K, G, H, MEAN, VAR]
    before = [g.clone() for g in given]
    for call, _ in RIGHT.values():
        call()
    bn()
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_results_do_not_share_memory_with_inputs() -> None:
    x = torch.rand(3, 4)
    for out in (t.relu(x), t.sum(x, ()), t.add(x, 0), t.mul(x, 1), t.max(x, ()), t.softmax(x, 0)):
        before = x.clone()
        out.fill_(7)
        assert torch.equal(x, before)
