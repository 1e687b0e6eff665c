"""What being recorded costs counts in the choice, where calls are so short that it matters."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

import tensorlogic
from tensorlogic.autotune import tuner
from tensorlogic.core import policy as policies
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import autograd_overhead, candidate_loading
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.kernels.cpu import cost_model
from tensorlogic.measure import timer
from tensorlogic.native import cpu_library
from tensorlogic.plans import open_stores
from tensorlogic.plans.environment import environment

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)

CPU = torch.device("cpu")
candidate_loading.ready("cpu")
RELU = OPS["relu"]


@pytest.mark.parametrize(("eager_us", "ours_us"), [(1.2, 0.6), (40.0, 30.0)])
@pytest.mark.parametrize(("direction", "saves"), [("forward", True), ("inference", False)])
def test_a_short_recorded_call_is_pytorchs_unless_much_is_gained(
    direction: str, saves: bool, eager_us: float, ours_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(calls: Iterable[str], *_: object, **__: object) -> timer.Samples:
        return timer.Samples({n: [eager_us if n == EAGER else ours_us] * 8 for n in calls})

    monkeypatch.setattr(tuner, "AUTOGRAD_OVERHEAD_US", lambda: 8.0)
    monkeypatch.setattr(timer, "device_samples", timed)
    key = RELU.key((torch.ones(3, 4), saves), direction)
    plan = tuner.KeyTuner(RELU, key, CPU, environment(CPU)).run()
    assert plan is not None
    assert (plan.eager == EAGER) == (saves and eager_us < 2)
    assert plan.captured != EAGER  # a captured call is not recorded anew
    said = [e.reason for e in plan.evidence if e.status == "measured"]
    assert any("4.0 us for the recording" in r for r in said) == saves


def test_unmeasured_short_calls_are_expected_to_pay_for_it() -> None:
    policy = policies.Policy(tune="off")
    for op, args in (("relu", (torch.ones(1),)), ("sum", (torch.ones(20), (0,), False))):
        recorded = OPS[op].key((*args, True), "forward")
        plain = OPS[op].key((*args, False), "inference")
        open_stores.forget()
        assert dispatch_selector.decide(OPS[op], recorded, CPU, policy).eager[0] == EAGER
        if cpu_library.calls_available() is None:
            assert dispatch_selector.decide(OPS[op], plain, CPU, policy).eager[0] != EAGER


def test_unmeasured_products_are_expected_to_pay_for_it_less_what_they_fuse() -> None:
    """A small product alone is PyTorch's where it is recorded; with a residual and an activation it replaces three records by one."""
    policy = policies.Policy(tune="off")
    x, w, bias = torch.ones(16, 16), torch.ones(16, 16), torch.ones(16)

    def serves(op: str, *args: object, direction: str) -> str:
        open_stores.forget()
        key = OPS[op].key((*args, direction == "forward"), direction)
        found = dispatch_selector.decide(OPS[op], key, CPU, policy).eager
        return found[0]

    assert serves("matmul", x, w, "none", direction="forward") == EAGER
    assert serves("linear", x, w, bias, x, "relu", direction="forward") != EAGER
    if cpu_library.calls_available() is None:
        assert serves("matmul", x, w, "none", direction="inference") != EAGER


@pytest.mark.parametrize("sleeps", [True, False])
def test_a_thread_that_must_be_woken_counts(sleeps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_model, "_sleeps", lambda: sleeps)
    woken, alone = (cost_model.torch_us(n, n, n, "f32", False) for n in (64, 63))
    assert (woken - alone > cost_model.WAKES / 2) == sleeps


def test_the_cost_is_measured() -> None:
    autograd_overhead._measured.cache_clear()
    with torch.no_grad():
        extra = autograd_overhead.extra_us()
    assert 0 < extra < 1000
    assert tuner.AUTOGRAD_OVERHEAD_US() == extra  # by which studies count it
    x = torch.ones(1, requires_grad=True)
    assert tensorlogic.relu(x).requires_grad
