"""Liger's losses behind our adapter, and what is refused there."""

from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
import torch
import torch.nn.functional as F

from tensorlogic.core.candidate import Candidate
from tensorlogic.core.op import OPS
from tensorlogic.providers import liger
from tensorlogic.providers.adapter import Package

from ..support.provider_fakes import (
    CPU,
    LABELS,
    half,
    key,
)
from ..support.provider_fakes import nothing_stays as nothing_stays  # a fixture

with_liger = pytest.mark.skipif(
    importlib.util.find_spec("liger_kernel") is None or torch.cuda.is_available(),
    reason="needs liger-kernel and no GPU",
)


def _liger(op: str, id: str) -> Candidate:
    liger.register(OPS)
    return OPS[op].candidates[id]


@with_liger
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_liger_cross_entropy(reduction: str, smoothing: float) -> None:
    candidate = _liger("softmax_cross_entropy", "liger.cross_entropy")
    x, t = torch.randn(2, 5, 37), torch.randint(37, (2, 5))
    t[0, ::2] = -100
    before = x.clone()
    asked = key("softmax_cross_entropy", x, t, -100, smoothing, reduction, False)
    assert candidate.supports(asked) is None
    (loss,) = candidate.bind(asked, candidate.configs(asked)[0], CPU)(x, t)
    flat = F.cross_entropy(
        x.view(10, 37), t.view(10), label_smoothing=smoothing, reduction=reduction
    )
    torch.testing.assert_close(loss, flat.view(loss.shape))
    assert torch.equal(x, before)  # Liger's own function sets ignored rows to zero


def test_what_liger_does_not_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Package, "missing", lambda self: None)
    loss = _liger("softmax_cross_entropy", "liger.cross_entropy")
    norm = OPS["layer_norm_linear"].candidates["liger.layer_norm"]
    saving = key("softmax_cross_entropy", half(4, 63), LABELS, -100, 0.1, "mean", True)
    assert "log-sum-exp" in str(loss.supports(saving))
    for args, words in (
        ((half(4, 64), None, None, half(24, 64), None, 1e-5, False), "needs gamma and beta"),
        (
            (half(4, 64), half(128)[::2], half(64), half(24, 64), None, 1e-5, False),
            "not contiguous",
        ),
        ((half(2, 65544), half(65544), half(65544), half(2, 65544), None, 1e-5, False), "longer"),
    ):
        assert words in str(norm.supports(key("layer_norm_linear", *args)))
