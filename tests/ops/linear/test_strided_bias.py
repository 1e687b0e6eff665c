"""A bias that is every other number of a row, or one number repeated, is what it says in every candidate and every way."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.compiler.rewrite.rule_set import WAYS
from tensorlogic.core.op import OPS
from tensorlogic.ops.convolution import CONVOLUTION
from tensorlogic.ops.gelu_linear import gelu_linear
from tensorlogic.ops.linear import linear

from ...support.helpers import by_way

BIASES = {"every other": torch.randn(96)[::2], "repeated": torch.randn(1).expand(48)}


def close(got: Tensor, want: Tensor, words: str) -> None:
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4, msg=lambda text: f"{words}: {text}")


@torch.no_grad()
@pytest.mark.parametrize("b", BIASES.values(), ids=BIASES)
def test_every_candidate_of_linear(b: Tensor) -> None:
    x, w, r = torch.randn(32, 64), torch.randn(48, 64), torch.randn(32, 48)
    for residual in (None, r):
        for activation in (None, "relu", "gelu"):
            with tensorlogic.policy(force="torch.eager"):
                want = linear(x, w, b.clone(), residual, activation)
            for candidate in OPS["linear"].candidates:
                with tensorlogic.policy(force=candidate):
                    close(linear(x, w, b, residual, activation), want, candidate)


@torch.no_grad()
@pytest.mark.parametrize("b", BIASES.values(), ids=BIASES)
def test_every_way_of_a_graph(b: Tensor) -> None:
    x, w, r = torch.randn(32, 64), torch.randn(48, 64), torch.randn(32, 48)
    for residual in (None, r):
        given = (x, w, b, residual, "gelu")
        for way in WAYS[linear]:
            if way.supports(given) is None:
                close(by_way(way.emit, given), linear(*given), way.id)
    for way in WAYS[gelu_linear]:
        if way.supports((x, w, b, "none")) is None:
            close(by_way(way.emit, (x, w, b, "none")), gelu_linear(x, w, b, "none"), way.id)
    image, kernel = torch.randn(2, 8, 6, 6), torch.randn(48, 8, 3, 3)
    for added in (None, torch.randn(2, 48, 4, 4)):
        args = (image, kernel, b, added, "none", (1, 1), (0, 0), (1, 1), 1)
        for way in CONVOLUTION.ways:
            if way.supports(args) is None:
                close(by_way(way.emit, args), CONVOLUTION(*args), way.id)
