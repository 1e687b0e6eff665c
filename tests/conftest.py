"""Every test has its own plan store and measures nothing it did not ask for."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if (
    not torch.cuda.is_available()
):  # kernels run in Triton's interpreter; it must be asked for before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

import tensorlogic
from tensorlogic import clocks, stores


@pytest.fixture(autouse=True)
def fresh_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A store of its own, no background measuring, seeded generators."""
    monkeypatch.setenv("TENSORLOGIC_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TENSORLOGIC_INDUCTOR", "0")  # seconds a model, where a test does not ask
    monkeypatch.setattr(clocks, "DRIFT", math.inf)  # whoever else runs here is waited for by nobody
    stores.forget()
    torch.manual_seed(0)
    with tensorlogic.policy(tune="off"):
        yield
    stores.forget()
