"""candidates, explain and tune on calls as people write them: keywords, ops that become other ops, forced choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS

X, W, B = torch.randn(5, 7), torch.randn(3, 7), torch.randn(3)


def test_keywords_are_arguments_too() -> None:
    by_position = tensorlogic.candidates(tensorlogic.linear, X, W)
    assert tensorlogic.candidates(tensorlogic.linear, x=X, weight=W) == by_position
    assert by_position["torch.inplace"] == "nothing to do in place"


@pytest.mark.parametrize(
    ("changes", "by"),
    [
        ({"p": 0.0}, "linear"),
        ({"x": X.to("meta"), "weight": W.to("meta"), "bias": None}, "PyTorch's own operations"),
    ],
)
def test_a_call_that_another_op_serves_says_so(changes: dict[str, Any], by: str) -> None:
    arguments = {"x": X, "weight": W, "bias": B} | changes
    found = tensorlogic.candidates(tensorlogic.dropout_linear, **arguments)
    assert list(found) == list(OPS["dropout_linear"].candidates)
    assert found.pop(EAGER) is None
    assert all(reason and reason.endswith(f"are served by {by}") for reason in found.values())


def test_tune_passes_keywords_on() -> None:
    learned = tensorlogic.tune(tensorlogic.linear, X, W, activation="silu")
    assert [p.key.flag("activation") for p in learned.plans] == ["silu"]
    assert tensorlogic.tune(tensorlogic.linear, X, weight=W, activation="silu").known == 1


def test_only_the_chosen_one_is_called_so() -> None:
    best = tensorlogic.tune(tensorlogic.add_relu, X, X).plans[0].eager
    with tensorlogic.policy(force="torch.inplace" if best == EAGER else EAGER):
        (shown,) = tensorlogic.explain(tensorlogic.add_relu, X, X)
    rows = {row[0]: row for row in shown.rows}
    assert rows[best][4:] == ("", "the best when it was measured")
    (shown,) = tensorlogic.explain(tensorlogic.add_relu, X, X)
    assert {row[0]: row for row in shown.rows}[best][5].startswith("chosen")


@pytest.mark.parametrize("name", ["constant", "invalidate"])
def test_only_tensors_have_derivatives(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: tensor is int; a torch.Tensor is required"):
        getattr(tensorlogic, name)(3)
