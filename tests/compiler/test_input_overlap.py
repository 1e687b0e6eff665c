"""optimize where inputs overlap in memory and the model writes into one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tensorlogic
from tensorlogic.compiler import program_search
from tensorlogic.measure import timer


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(8, 8)

    def forward(self, x: Tensor, whole: Tensor, part: Tensor) -> Tensor:
        part.copy_(F.relu(self.lin(x)))
        return whole + 1


def test_graphs_with_copies_of_inputs_take_none_that_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As CUDA graphs have: a write to one copy would not be seen in the other."""
    monkeypatch.setattr(program_search, "MUST_GAIN", 1e9)
    monkeypatch.setattr("tensorlogic.compiler.tune.region_tuner.LEAST_GAIN", 1e9)
    monkeypatch.setattr("tensorlogic.compiler.tune.region_tuner.USUAL_SHARE_S", 0.001)
    monkeypatch.setattr(timer.Samples, "ratio", lambda self, a, b: (0.5, 0.4, 0.6))
    with torch.no_grad():
        x, whole, replayed = torch.randn(2, 8), torch.randn(2, 2, 8), []
        fast: Any = tensorlogic.optimize(Writing().eval(), (x, whole, torch.randn(2, 8)))
        program = getattr(fast._program, "program", fast._program)
        program.replay, program.pointers = replayed.append, program._where()
        monkeypatch.setattr(program, "_shorten", lambda *_: None)
        out = fast(x, whole, whole[0])
        assert not replayed
        torch.testing.assert_close(out, whole + 1)
        fast(x, whole, torch.randn(2, 8))
        assert len(replayed) == 1
