"""What many calls leave behind: nothing per call, and a bounded number of things per shape."""

from __future__ import annotations

import gc
from collections.abc import Callable

import numpy as np
import pytest
import torch

import tensorlogic as t
from tensorlogic.autotune import background_tuning
from tensorlogic.core import policy
from tensorlogic.dispatch import bound_call
from tensorlogic.dispatch import call_cache as dispatch_call_cache

X, W, ROW, MASK = torch.randn(8, 16), torch.randn(4, 16), torch.randn(4), torch.zeros(8, 8)


def objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def trained() -> None:
    w = W.clone().requires_grad_()
    t.linear(X, w, None, None, "gelu").sum().backward()


def lowered() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        t.linear(X, W)


CALLS: dict[str, Callable[[], object]] = {
    "linear": lambda: t.linear(X, W),
    "strided": lambda: t.linear(X.t().contiguous().t(), W),
    "number": lambda: t.add(X, 1.0),
    "number first": lambda: t.sub(2, X),
    "fused number": lambda: t.affine(X, 2.0, 0.5),
    "numpy number": lambda: t.add(X, np.float32(2)),
    "explain": lambda: t.explain(t.linear, X, W),
    "residual of a row": lambda: t.linear(X, W, None, ROW, "relu"),
    "row under precision": lambda: t.linear(X, W, None, ROW, precision=t.precision("f32")),
    "list of dims": lambda: t.sum(X, [0, 1]),
    "range of dims": lambda: t.max(X, range(2)),  # type: ignore[arg-type]
    "numpy scale": lambda: t.attention_scores(X, X, np.float64(0.5)),
    "mask of another dtype": lambda: t.attention_scores(X.half(), X.half(), 0.5, MASK),
    "dropout": lambda: t.dropout_linear(X, W, None, 0.5),
    "gradients": trained,
    "autocast": lowered,
    "complex": lambda: t.matmul(X + 0j, W.t() + 0j),
    "inference": lambda: torch.inference_mode()(t.relu)(X),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_a_call_leaves_nothing_behind(name: str) -> None:
    call = CALLS[name]
    for _ in range(20):
        call()
    before = objects()
    for _ in range(100):
        call()
    assert objects() - before < 50


SETTLED = [
    "number", "number first", "fused number", "numpy number", "residual of a row", "row under precision", "list of dims",
    "range of dims", "numpy scale", "mask of another dtype",
]  # fmt: skip


@pytest.mark.parametrize("name", SETTLED)
def test_what_is_no_tensor_yet_is_chosen_for_once(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CALLS[name]()
    monkeypatch.setattr(bound_call, "Bound", lambda *_: pytest.fail("chosen again"))
    CALLS[name]()


def test_shapes_without_end_leave_a_bounded_number_of_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch_call_cache, "MOST_ENTRIES", 10)
    monkeypatch.setattr(background_tuning, "MOST", 10)
    for n in range(1, 40):
        t.relu(torch.ones(n))
    assert len(policy.current().entries) <= 10
    assert len(background_tuning._WATCHES) <= 10


def test_policies_without_end_are_dropped() -> None:
    for n in range(policy.MOST + 20):
        with t.precision("adaptive", rtol=1e-2 + n * 1e-6):
            pass
    assert len(policy._INTERNED) <= policy.MOST
    assert policy.ROOT in policy._INTERNED.values()
    with t.policy(tune="off"):
        first = policy.current()
    with t.policy(tune="off"):
        assert policy.current() is first


def test_dropped_keys_are_freed() -> None:
    """A launcher under watch and its watch refer to each other."""
    t.relu(torch.ones(3, 5))
    policy.forget_entries()
    background_tuning.forget()
    before = objects()
    for n in range(200):
        t.relu(torch.ones(3, n + 100))
    policy.forget_entries()
    background_tuning.forget()
    assert objects() - before < 200
