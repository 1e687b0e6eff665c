"""Softmax of rows that begin at odd places, in aligned groups: kernels against float64, the candidate, what the compiler makes of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.triton import (
    DEVICE,
    TORCH,
    close,
    launches,
    offered_are_right,
    poisoned,
    rand,
    softmax_keys,
    special_rows,
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS

from tensorlogic.core.candidate import Candidate  # isort: skip
from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from tensorlogic.kernels.softmax import ragged as softmax_ragged  # isort: skip

from ...support.compiled import nothing_spills

from ...support.compiled import ptx  # isort: skip
from ...support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
SHAPES = (
    (1, 33),
    (9, 47),
    (5, 250),
    (3, 263),
    (10, 333),
    (4, 1001),
    (2, 1029),
)  # every remainder, and rows that end with their tile or a group behind it


def configs(columns: int, dtype: str, backward: bool) -> list[dict[str, Any]]:
    """What is offered, and a swept one where none is."""
    swept = {"strategy": "swept", "LANES": 32, "num_warps": 1}
    return [*softmax_ragged.groups_configs(columns, dtype, backward), swept]


def softmax(x: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """y of x [R, C], from a poisoned output, beside which nothing is written."""
    y = poisoned(*x.shape, dtype=dtype)
    assert softmax_ragged.groups_launcher(*x.shape, dtype, config, DEVICE)(x, y)
    return y


def softmax_backward(dy: Tensor, y: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """dx, likewise."""
    dx = poisoned(*y.shape, dtype=dtype)
    assert softmax_ragged.groups_launcher(*y.shape, dtype, config, DEVICE, backward=True)(y, dy, dx)
    return dx


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_softmax_in_groups(dtype: str, shape: tuple[int, int]) -> None:
    x = rand(*shape, dtype=dtype, scale=4.0)
    want = torch.softmax(x.double(), 1).to(TORCH[dtype])
    for config in configs(shape[1], dtype, False):
        close(softmax(x, dtype, config), want, dtype, 0.01)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_gradients_in_groups(dtype: str, shape: tuple[int, int]) -> None:
    y = torch.softmax(rand(*shape, scale=4.0), 1).to(TORCH[dtype])
    dy = rand(*shape, dtype=dtype, seed=1)
    dy[0, -1] = float("nan")  # its row is NaN, no other
    p, g = y.double(), dy.double()
    want = (p * (g - (p * g).sum(1, keepdim=True))).to(TORCH[dtype])
    for config in configs(shape[1], dtype, True):
        close(softmax_backward(dy, y, dtype, config), want, dtype, 0.5)


@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_special_rows(dtype: str) -> None:
    """Nothing finite but at an end or in the groups, infinities and NaN in either, a row of -inf alone, and the ends of the range."""
    x, want = special_rows(dtype)
    for config in configs(77, dtype, False):
        close(softmax(x, dtype, config), want, dtype, 0.01)


def candidate(name: str) -> Candidate:
    candidate_loading.ready(DEVICE.type)
    return OPS[name].candidates["triton.groups"]


@pytest.mark.parametrize("shape", [(7, 333), (2, 3, 101), (4101,), (2, 4099)])
def test_its_configurations_are_right(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).half()
    for op, key in softmax_keys(x, x.dim() - 1):
        assert 2 <= offered_are_right(op, candidate(op.name), key) <= 9


def test_a_public_call_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate("softmax")
    served = launches(monkeypatch, softmax_ragged, "groups_launcher")
    x, dy = rand(6, 333, dtype="f16").requires_grad_(), rand(6, 333, dtype="f16", seed=1)
    wide = x.detach().double().requires_grad_()
    torch.softmax(wide, 1).backward(dy.double())
    with tensorlogic.policy(tune="off", force={"softmax": "triton.groups", "softmax_backward": "triton.groups"}):  # fmt: skip
        y = tensorlogic.softmax(x, 1)
        y.backward(dy)
    assert len(served) >= 2  # where launches are noted, to be made in C: twice each
    assert all(served)
    close(y.detach(), torch.softmax(wide.detach(), 1), "f16", 0.01)
    assert x.grad is not None
    assert wide.grad is not None
    close(x.grad, wide.grad, "f16", 0.01)


def test_what_is_left_to_others_is_named() -> None:
    said = candidate("softmax").supports
    half = torch.zeros(9, 333).half()
    for x, reason in (
        (torch.zeros(9, 336).half(), "begin at 16-byte addresses"),
        (torch.empty(9, 4), "begin at 16-byte addresses"),
        (torch.zeros(9, 31).half(), "too short"),
        (torch.empty(9, 15), "too short"),
        (
            torch.empty(1, 2**31 + 1, dtype=torch.float16, device="meta"),
            "longer than 32 bits count",
        ),
        (torch.empty(9, 333, dtype=torch.float64), "f64"),
        (torch.empty(0, 333), "empty"),
        (half[:, 1:], "not contiguous"),
        (half.flatten()[1:].view(4, -1), "tensors at 16-byte addresses"),
    ):
        key = replace(OPS["softmax"].key([x, 1, False], "inference"), device=DEVICE.type)
        assert reason in str(said(key)), (reason, said(key))
    assert said(OPS["softmax"].key([half, 1, False], "inference")) is None
    assert said(OPS["softmax"].key([torch.empty(9, 17), 1, False], "inference")) is None


def test_a_configuration_that_holds_too_little_is_refused() -> None:
    config = {"strategy": "held", "ROWS": 2, "num_warps": 4}
    with pytest.raises(CompileFailure, match="does not fit rows of 5003"):
        softmax_ragged.groups_launcher(4, 5003, "f32", config, DEVICE)


LENGTHS = (
    333,
    1001,
    8189,
    12285,
    16381,
    28661,
    40957,
)  # the last the longest that 16 and 32 warps hold, of one tensor or two


def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest rows of each configuration among them."""
    cuda, jobs = torch.device("cuda", 0), []
    for sm, columns, dtype, backward in (
        *itertools.product((90,), LENGTHS, ("f16",), (False, True)),
        *itertools.product((90,), (333, 8189), ("f32",), (False, True)),
        *itertools.product((80, 100), (20001,), ("bf16",), (False, True)),
    ):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        for config in softmax_ragged.groups_configs(columns, dtype, backward):

            def build(c: int = columns, d: str = dtype, g: Any = config, b: bool = backward) -> Any:
                return softmax_ragged.groups_launcher(4096, c, d, g, cuda, b)

            jobs += launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    assert {job.kernel for job in jobs} == {
        kernel.__name__ for kernel in softmax_ragged.KERNELS.values()
    }
    nothing_spills(jobs)


def test_groups_are_accessed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread has one access of 16 bytes a group and tensor, and one of an element for the ends of a row."""
    monkeypatch.setattr(launch, "_capability", lambda device: 90)
    cuda, config = torch.device("cuda", 0), {"strategy": "held", "ROWS": 2, "num_warps": 2}
    jobs = [
        launch.collect(
            lambda b=backward: softmax_ragged.groups_launcher(4096, 333, "f16", config, cuda, b),
            cuda,
        )[0]
        for backward in (False, True)
    ]
    for text, tensors in zip(ptx(jobs), (1, 2), strict=True):
        found = re.findall(r"(ld|st)\.global\S*\.(v4\.b32|b16)", text)
        for access, count in (("ld", 2 * tensors), ("st", 2)):
            assert found.count((access, "v4.b32")) == count, text
            assert found.count((access, "b16")) == count, text
