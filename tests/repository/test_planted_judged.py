"""What planted candidates are judged by besides their output: statistics, aliases, sources, names, samples."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading, dispatcher
from tensorlogic.dispatch import selector as dispatch_selector
from tensorlogic.measure import verification
from tensorlogic.plans import open_stores

from ..support.plans import (
    CPU,
    Install,
    inputs,  # the fixture
)
from ..support.plans import install as install  # a fixture


@pytest.mark.slow
def test_running_statistics_are_judged_as_well(install: Install) -> None:
    install(
        extra="""
        norm = ops["linear_batch_norm_relu"]
        def forgets(x, weight, bias, running_mean, running_var, gamma, beta, eps, training, momentum, save):
            return norm.reference(x, weight, bias, None, None, gamma, beta, eps, training, momentum, save)
        norm.candidate("planted.forgets", supports=lambda key: None if key.flag("training") else "training only")(forgets)
        """
    )
    args = (torch.randn(16, 8), torch.randn(4, 8), None, torch.zeros(4), torch.ones(4), None, None)

    def run(*given: Any) -> Tensor:
        return tensorlogic.linear_batch_norm_relu(*given, training=True)

    (plan,) = tensorlogic.tune(run, *args).plans
    (evidence,) = [e for e in plan.evidence if e.candidate == "planted.forgets"]
    assert evidence.status == "refused"
    assert evidence.reason.startswith("wrong: output")


def test_an_output_that_is_an_input_is_refused(install: Install) -> None:
    install(
        extra="""
        op = ops["relu"]
        op.candidate("planted.alias")(lambda x, save: (x if bool((x >= 0).all()) else torch.relu(x),))
        """
    )
    op = OPS["relu"]
    x = torch.rand(32)
    with tensorlogic.policy(force="planted.alias"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(op, "sample", lambda key, name, spec, device, g: torch.rand(32, generator=g))
        with pytest.raises(dispatch_selector.Refused, match="shares memory with its input x"):
            tensorlogic.relu(x)


def test_a_refusal_is_remembered_for_the_source(install: Install) -> None:
    install(
        extra="""
        def counted(*a):
            COUNT[0] += 1
            return (right(*a) + 1,)
        plant("counted", counted)
        """
    )
    x, w, b = inputs()
    tensorlogic.tune(tensorlogic.linear, x, w, b)
    calls = sys.modules["planted_candidates"].COUNT
    seen = calls[0]
    open_stores.forget()
    again = tensorlogic.tune(tensorlogic.linear, x, w, b)
    assert (again.known, calls[0]) == (1, seen)


def test_a_candidate_id_is_checked(install: Install) -> None:
    op = OPS["relu"]
    with pytest.raises(TypeError, match=r"has parameters \['x'\]; the schema is \['x', 'save'\]"):
        op.candidate("planted.schema")(lambda x: (x,))
    with pytest.raises(ValueError, match="already has a candidate"):
        op.candidate(EAGER)(lambda x, save: (x,))
    with pytest.raises(ValueError, match=r"must read 'provider\.strategy'"):
        op.candidate("planted")(lambda x, save: (x,))
    assert dispatcher.call(op, (torch.ones(2),)).tolist() == [1, 1]


def test_gradients_that_pass_through_unchanged_are_no_misuse() -> None:
    """dy itself is the bias's gradient, as eager returns it: on the probe with another one's values, too."""
    a, b = torch.randn(8), torch.randn(8)
    op = OPS["pointwise_backward"]
    key = op.key([a, a, b, None, None, "affine", "011"], "backward")
    found = verification.Checker(op, key, CPU).check(op.plain(key, CPU))
    assert found, found.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_sum_of_sample_inputs_cancels_by_luck(dtype: torch.dtype) -> None:
    candidate_loading.ready("cpu")
    for name, shape, dim in (("sum", (59,), (0,)), ("mean", (64, 33), (1,))):
        key = OPS[name].key((torch.empty(shape, dtype=dtype), dim, False, False), "inference")
        for seed in range(64):
            (x,) = verification.InputSet(OPS[name], key, CPU, seed).dynamic
            sums, norms = x.double().sum(dim), x.double().square().sum(dim).sqrt()
            assert bool((sums.abs() > 0.9 * norms).all())
