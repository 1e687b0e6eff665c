"""When calls measure and when nothing may be measured."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import tensorlogic
from tensorlogic.autotune import ranking, tuner
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.key import Key
from tensorlogic.plans import open_stores
from tensorlogic.system import capture_state

from ..support.plans import (
    RELU,
    Served,
    decided,  # the fixture
)
from ..support.plans import nothing_measured as nothing_measured  # a fixture
from ..support.plans import served as served  # a fixture


def test_tune_says_no_where_nothing_is_measured() -> None:
    with (
        tensorlogic.policy(deterministic=True),
        pytest.raises(RuntimeError, match="call tune outside"),
    ):
        tensorlogic.tune(tensorlogic.relu, torch.randn(3))


@pytest.mark.usefixtures("nothing_measured")
def test_off_measures_nothing(served: Served) -> None:
    with tensorlogic.policy(tune="off"):
        for _ in range(200):
            tensorlogic.relu(torch.ones(5))


def test_full_measures_on_first_sight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    init = tuner.KeyTuner.__init__

    def noted(self: tuner.KeyTuner, op: Any, key: Key, *rest: Any, **named: Any) -> None:
        made.append(key.text)
        init(self, op, key, *rest, **named)

    monkeypatch.setattr(tuner.KeyTuner, "__init__", noted)
    x = torch.randn(8, 8)
    with tensorlogic.policy(tune="full"):
        for _ in range(3):
            tensorlogic.relu(x)
        open_stores.forget()  # the file remains
        tensorlogic.relu(x)
    assert len(made) == 1
    assert decided(x)[0] == "plan"


def _traced(x: Tensor) -> None:
    make_fx(tensorlogic.relu)(x)


def _captured(x: Tensor) -> None:
    capture_state._open.add(1)
    try:
        tensorlogic.relu(x)
    finally:
        capture_state._open.discard(1)


def _jit(x: Tensor) -> None:
    torch.jit.trace(tensorlogic.relu, (x,), check_trace=False)


def _transformed(x: Tensor) -> None:
    torch.func.vmap(tensorlogic.relu)(x)


def _the_same_bits(x: Tensor) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        tensorlogic.relu(x)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("nothing_measured")
@pytest.mark.parametrize("way", [_traced, _captured, _jit, _transformed, _the_same_bits])
def test_full_measures_nothing_meanwhile(way: Callable[[Tensor], None]) -> None:
    with tensorlogic.policy(tune="full"):
        way(torch.randn(4, 4))


def test_measuring_leaves_the_callers_state_alone() -> None:
    def plain(x: Tensor, save: bool) -> tuple[Tensor, ...]:
        return (torch.relu(x),)

    kept = dict(RELU.candidates)
    RELU.candidate("toy.plain")(plain)
    try:
        for inference in (False, True):
            torch.manual_seed(5)
            before = torch.get_rng_state()
            with (
                torch.inference_mode(inference),
                torch.autocast("cpu", dtype=torch.float16),
                tensorlogic.policy(tune="full"),
            ):
                x = torch.ones(4, 4 + inference)
                out = tensorlogic.relu(x)
                assert torch.is_autocast_enabled("cpu")
                assert torch.is_grad_enabled() != inference
                assert torch.is_inference_mode_enabled() == inference
                assert torch.get_autocast_dtype("cpu") is torch.float16
            assert torch.equal(torch.get_rng_state(), before)
            assert out.sum() == x.numel()
            assert decided(x)[0] == "plan"
    finally:
        RELU.candidates.clear()
        RELU.candidates.update(kept)


@pytest.mark.parametrize(
    ("op", "kind", "eager_us", "winner"),
    [
        ("pointwise_backward", "cuda", 1.0, "triton.flat"),
        ("pointwise_backward", "cuda", 0.985, "triton.flat"),
        ("pointwise_backward", "cuda", 0.97, EAGER),
        ("pointwise_backward", "cpu", 1.0, EAGER),
        ("linear_backward", "cuda", 1.0, EAGER),
        ("linear_backward", "cuda", 1.03, "triton.flat"),
    ],
)
def test_a_gradient_of_elements_wins_ties(op: str, kind: str, eager_us: float, winner: str) -> None:
    """On a GPU it is timed between kernels of PyTorch's, which it cannot overlap."""
    final: list[Any] = [
        SimpleNamespace(candidate=SimpleNamespace(id=id, trusted=True))
        for id in (EAGER, "triton.flat")
    ]
    key: Any = SimpleNamespace(op=op, direction="backward", precision="default", tensors=())
    times = {EAGER: eager_us, "triton.flat": 1.0}
    assert ranking.pick(final, times, key, kind).candidate.id == winner
