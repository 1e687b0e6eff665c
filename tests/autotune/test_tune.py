"""A tune that is interrupted keeps what it has measured and leaves everything else as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tensorlogic
from tensorlogic.autotune import tune
from tensorlogic.core import policy
from tensorlogic.plans import open_stores

CPU = torch.device("cpu")


def test_an_interrupted_tune_keeps_what_it_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measure, asked = tune._measure, []

    def interrupted(*given: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(given[1])
        measure(*given)

    def step() -> None:
        for n in (3, 5, 7):
            tensorlogic.relu(torch.ones(n))

    monkeypatch.setattr(tune, "_measure", interrupted)
    before = policy.current()
    with pytest.raises(KeyboardInterrupt):
        tensorlogic.tune(step)
    assert [p.key.text for p in open_stores.current(CPU).plans()] == [asked[0].text]
    assert policy.current() is before
    assert torch.is_grad_enabled()
    monkeypatch.undo()
    learned = tensorlogic.tune(step)
    assert (learned.known, len(learned.plans)) == (1, 2)
