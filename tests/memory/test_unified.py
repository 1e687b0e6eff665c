"""Unified tensors: moved when stale and never otherwise, and never stale."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

import tensorlogic
from tensorlogic.memory import transfer, unified


class Elsewhere:
    """A second device that is not there: copies under its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moves = 0
        self.name = "xpu"
        monkeypatch.setattr(transfer, "to", self.to)

    def to(self, tensor: torch.Tensor, device: Any) -> torch.Tensor:
        self.moves += 1
        return tensor.detach().clone()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    return Elsewhere(monkeypatch)


def test_a_unified_tensor_moves_once(elsewhere: Elsewhere) -> None:
    x = tensorlogic.unified(torch.ones(4, 4))
    for _ in range(3):
        assert x.on("xpu").tolist() == x.on("cpu").tolist()
    assert elsewhere.moves == 1
    assert x.stats == unified.UnifiedStats(1, 64, 128)
    assert "unified(torch.float32, [4, 4]" in repr(x)


def test_an_array_that_somebody_takes_of_a_tensor_is_never_trusted(elsewhere: Elsewhere) -> None:
    t = torch.ones(4)
    x = tensorlogic.unified(t)
    x.on("xpu"), x.on("xpu")
    assert elsewhere.moves == 1
    array = t.numpy()  # nobody tells us
    array[0] = 7
    assert x.on("xpu").tolist() == [7, 1, 1, 1]
    array[1] = 8
    assert not x.has("xpu")
    assert x.on("xpu").tolist() == [7, 8, 1, 1]
    before = np.ones(3, dtype=np.float32)
    y = tensorlogic.unified(torch.from_numpy(before))
    y.on("xpu")
    before[0] = 5
    assert y.on("xpu").tolist() == [5, 1, 1]
    made = unified.Unified(torch.from_numpy(np.ones(3)), made=True)  # as pooled memory may look
    before_moves = elsewhere.moves
    made.on("xpu"), made.on("xpu")
    assert elsewhere.moves == before_moves + 1


def test_a_parameter_that_shares_an_array_is_moved_anew(elsewhere: Elsewhere) -> None:
    place, weight = torch.device("meta"), torch.nn.Parameter(torch.ones(3), requires_grad=False)
    placement = importlib.import_module("tensorlogic.device_placement.placement")
    placement._moved(weight, place), placement._moved(weight, place)
    assert elsewhere.moves == 1
    array = weight.detach().numpy()
    array[0] = 9
    assert placement._moved(weight, place).tolist() == [9, 1, 1]
    assert placement._moved(weight, place).tolist() == [9, 1, 1]
    assert elsewhere.moves == 3


def test_a_write_is_seen_wherever_it_happens(elsewhere: Elsewhere) -> None:
    t = torch.ones(4)
    x = tensorlogic.unified(t)
    there = x.on("xpu")
    t.add_(1)
    assert x.on("xpu").tolist() == [2, 2, 2, 2]
    assert x.on("xpu") is not there
    array = x.numpy()
    array[0] = 7
    assert x.on("xpu")[0] == 7
    array[1] = 8  # the array lives: nothing is kept
    assert x.on("xpu")[1] == 8
    del array
    moves = elsewhere.moves
    x.on("xpu")
    x.on("xpu")
    assert elsewhere.moves <= moves + 1
    t.data[2] = 9  # unseen, as documented, until it is said
    x.invalidate()
    assert x.on("xpu")[2] == 9


def test_a_numpy_array_given_is_never_trusted(elsewhere: Elsewhere) -> None:
    array = np.ones(4, dtype=np.float32)
    x = tensorlogic.unified(array)
    x.on("xpu")
    array[0] = 5
    assert x.on("xpu")[0] == 5
    assert not x.has("xpu")
    frozen = np.ones(4, dtype=np.float32)
    frozen.flags.writeable = False
    x = tensorlogic.unified(frozen)
    x.on("xpu")
    assert x.has("xpu")


def test_two_writers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tensorlogic.unified(torch.ones(2))
    here, there = x.on("cpu"), torch.ones(2)
    x._copies[torch.device("xpu")] = (there, there._version)
    here.add_(1)
    there.add_(1)
    with pytest.raises(RuntimeError, match="both written to"):
        x.on("cpu")


def test_unified_arguments_make_unified_results() -> None:
    a = torch.randn(8, 8)
    plain = tensorlogic.matmul(a, a)
    x = tensorlogic.unified(a)
    y = tensorlogic.linear(tensorlogic.matmul(x, a), x)
    assert isinstance(y, unified.Unified)
    assert np.asarray(y).shape == (8, 8)
    torch.testing.assert_close(y.on("cpu"), torch.nn.functional.linear(plain, a))
    assert torch.utils.dlpack.from_dlpack(x).data_ptr() == a.data_ptr()
    with pytest.raises(TypeError, match="unified: tensor is int"):
        tensorlogic.unified(3)
