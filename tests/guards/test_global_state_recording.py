"""Questions that code puts to PyTorch are noted while it runs: its own, not those of libraries, and beside other profilers."""

from __future__ import annotations

import cProfile
import sys
from typing import Any

import torch
from torch import nn

import tensorlogic
from tensorlogic.guards import global_state

from ..support.graphs import DEVICE, QUESTIONS, optimized, some


def test_what_pytorch_and_we_ask_for_others_is_not_noted() -> None:
    model = nn.TransformerEncoderLayer(8, 2, batch_first=True).to(DEVICE).eval()
    with global_state.noting() as names, torch.no_grad():
        model(torch.randn(1, 3, 8, device=DEVICE))
        tensorlogic.linear(some(), torch.randn(8, 8, device=DEVICE))
        with torch.autocast("cpu", enabled=False):
            some().detach()
    assert names == {"default device"}  # of `some`
    with global_state.noting() as names:
        QUESTIONS["wants a gradient"][0](some())
    assert "requires_grad" in names


class Opaque:
    """A profiler that nobody can share."""

    def __call__(self, *_: Any) -> None:
        pass


def test_a_profiler_that_cannot_be_shared_makes_everything_count_as_asked(pays: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).to(DEVICE).requires_grad_(False).eval()
    profiler = Opaque()
    sys.setprofile(profiler)
    try:
        fast = optimized(model, some())
        assert sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    x, miss = some(), tensorlogic.guards.errors.MISS
    assert fast._program((x,), {}) is miss
    with torch.no_grad():
        assert fast._program((x,), {}) is not miss


def test_other_profilers_are_shared_or_wait() -> None:
    seen: list[str] = []

    def other(frame: Any, event: str, arg: Any) -> None:
        seen.append(getattr(arg, "__name__", ""))

    sys.setprofile(other)
    try:
        with global_state.noting() as names:
            torch.is_grad_enabled()
        assert sys.getprofile() is other
    finally:
        sys.setprofile(None)
    assert names == {"is_grad_enabled"}
    assert "is_grad_enabled" in seen
    profile = cProfile.Profile()
    profile.enable()
    try:
        with global_state.noting() as names:
            torch.is_grad_enabled()
        torch.is_inference_mode_enabled()
    finally:
        profile.disable()
    assert names == {"is_grad_enabled"}
    assert any("is_inference_mode_enabled" in str(e.code) for e in profile.getstats())
