"""Softmax of few, long rows, shared by programs, wherever they begin: kernels against float64, the candidate, what the compiler makes of it."""

from __future__ import annotations

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
from tensorlogic.kernels.row_access import split as row_access_split  # isort: skip
from tensorlogic.kernels.softmax import split as softmax_split  # isort: skip


from ...support.compiled import nothing_spills

from ...support.compiled import ptx  # isort: skip
from ...support.triton import default_device as default_device  # a fixture
from ...support.triton import small as small  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
CONFIGS = (
    {"parts": 3, "LANES": 4, "num_warps": 4},  # shares of several tiles
    {"parts": 2, "LANES": 32, "num_warps": 1},  # of one, with room
    {"parts": 5, "LANES": 2, "num_warps": 4},  # the last one's share is nothing, or next to it
)
NAMED = [f"{config['parts']} parts" for config in CONFIGS]
SHAPES = ((2, 65), (9, 71), (3, 131), (2, 250), (2, 80))  # every remainder, and none


def softmax(x: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """y of x [R, C], from a poisoned output and poisoned partial results, beside which nothing is written."""
    y, part = poisoned(*x.shape, dtype=dtype), poisoned(softmax_split.shares_space(*x.shape, config, False))  # fmt: skip
    assert softmax_split.shares_launcher(*x.shape, dtype, config, DEVICE)(x, part, y)
    return y


def softmax_backward(dy: Tensor, y: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """dx, likewise."""
    dx, part = poisoned(*y.shape, dtype=dtype), poisoned(softmax_split.shares_space(*y.shape, config, True))  # fmt: skip
    assert softmax_split.shares_launcher(*y.shape, dtype, config, DEVICE, True)(dy, y, part, dx)
    return dx


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_softmax_by_shares(dtype: str, shape: tuple[int, int], config: dict[str, Any]) -> None:
    x = rand(*shape, dtype=dtype, scale=4.0)
    close(softmax(x, dtype, config), torch.softmax(x.double(), 1).to(TORCH[dtype]), dtype, 0.01)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_gradients_by_shares(dtype: str, shape: tuple[int, int], config: dict[str, Any]) -> None:
    y = torch.softmax(rand(*shape, scale=4.0), 1).to(TORCH[dtype])
    dy = rand(*shape, dtype=dtype, seed=1)
    dy[0, -1] = float("nan")  # its row is NaN, no other
    p, g = y.double(), dy.double()
    want = (p * (g - (p * g).sum(1, keepdim=True))).to(TORCH[dtype])
    close(softmax_backward(dy, y, dtype, config), want, dtype, 0.5)


def test_the_same_bits_every_time() -> None:
    x, y, dy = rand(3, 131, scale=4.0), rand(3, 131).abs(), rand(3, 131, seed=1)
    for config in CONFIGS:
        assert torch.equal(softmax(x, "f32", config), softmax(x, "f32", config))
        first, second = (softmax_backward(dy, y, "f32", config) for _ in range(2))
        assert torch.equal(first, second)


@pytest.mark.parametrize("config", CONFIGS, ids=NAMED)
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_special_rows(dtype: str, config: dict[str, Any]) -> None:
    """Nothing finite but at an end or in one share, infinities and NaN in either, a row of -inf alone, and the ends of the range."""
    x, want = special_rows(dtype)
    close(softmax(x, dtype, config), want, dtype, 0.01)


@pytest.mark.parametrize("column", [0, 7, 8, 15, 16, 31, 32, 69, 76])
def test_no_element_is_left_out(column: int) -> None:
    """A single 1 in the sum of a row's gradient; a single element that is not -inf."""
    x, y = torch.full((8, 77), float("-inf")).half(), torch.zeros(8, 77).half()
    x[:, column], y[:, column] = 1.0, 1.0
    for config in CONFIGS:
        assert torch.equal(softmax(x, "f16", config), y)
        dx = softmax_backward(torch.ones(8, 77).half(), y, "f16", config)
        assert torch.equal(dx, torch.zeros_like(dx))


def candidate(name: str) -> Candidate:
    candidate_loading.ready(DEVICE.type)
    return OPS[name].candidates["triton.shares"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(8203,), (2, 9001), (2, 1, 8212), (2, 8192)])
def test_its_configurations_are_right(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).half()
    for op, key in softmax_keys(x, x.dim() - 1):
        assert 1 <= offered_are_right(op, candidate(op.name), key) <= 6


@pytest.mark.usefixtures("small")
def test_a_public_call_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate("softmax")
    served = launches(monkeypatch, softmax_split, "shares_launcher")
    x, dy = rand(2, 8203, dtype="f16").requires_grad_(), rand(2, 8203, dtype="f16", seed=1)
    wide = x.detach().double().requires_grad_()
    torch.softmax(wide, 1).backward(dy.double())
    with tensorlogic.policy(tune="off", force={"softmax": "triton.shares", "softmax_backward": "triton.shares"}):  # fmt: skip
        y = tensorlogic.softmax(x, 1)
        y.backward(dy)
    assert len(served) >= 2  # where launches are noted, to be made in C: twice each
    assert all(served)
    close(y.detach(), torch.softmax(wide.detach(), 1), "f16", 0.001)
    assert x.grad is not None
    assert wide.grad is not None
    close(x.grad, wide.grad, "f16", 0.001)


@pytest.mark.usefixtures("small")
def test_what_is_left_to_others_is_named() -> None:
    said = candidate("softmax").supports
    for shape, reason in (
        ((2, 8191), "too short to be shared"),
        ((12, 8203), "12 programs need no others"),
        ((11, 2**30 - 1), "longer than sums are exact"),
        ((1, 2**31 + 1), "longer than 32 bits count"),
    ):
        x = torch.empty(shape, dtype=torch.float16, device="meta")
        key = replace(OPS["softmax"].key([x, 1, False], "inference"), device=DEVICE.type)
        assert reason in str(said(key)), (reason, said(key))


def test_a_configuration_of_other_rows_is_refused() -> None:
    config = {"parts": 300, "LANES": 128, "num_warps": 4}
    with pytest.raises(CompileFailure, match="does not fit rows of 99999"):
        softmax_split.shares_launcher(4, 99999, "f16", config, DEVICE)


@pytest.mark.parametrize("rows", [1, 3, 64, 500])
@pytest.mark.parametrize("columns", [8203, 50257, 13349437, 2**30 - 1])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_rows_are_cut_so_that_programs_fill_a_gpu(dtype: str, columns: int, rows: int) -> None:
    """And so that the parts of a row are few enough, not empty, and their sums exact enough."""
    offered = softmax_split.shares_configs(rows, columns, dtype)
    assert (not offered) == (columns >= 2**30 - 1 and rows >= 64)
    for config in offered:
        span = row_access_split.span_of(columns, config["parts"])
        assert 2 <= config["parts"] <= softmax_split.MOST_PARTS
        assert span % 16 == 0
        assert (config["parts"] - 1) * span < columns <= config["parts"] * span
        assert span <= row_access_split.CHAIN * row_access_split.tile_of(config["LANES"], dtype)
    if offered:  # as many programs as multiprocessors, or of a tile each
        first = offered[0]
        one = row_access_split.tile_of(first["LANES"], dtype)
        assert (
            rows * first["parts"] >= 132 or row_access_split.span_of(columns, first["parts"]) <= one
        )


@pytest.mark.slow
def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a thread has one access of 16 bytes a group and tensor where it reads or writes one."""
    cuda, jobs = torch.device("cuda", 0), []
    for sm, rows, columns, dtype in (
        (90, 1, 13349437, "f16"),
        (90, 8, 50257, "f16"),
        (90, 3, 600001, "f32"),
        (80, 8, 50257, "bf16"),
        (100, 8, 50257, "bf16"),
    ):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        for config in softmax_split.shares_configs(rows, columns, dtype):
            for backward in (False, True):

                def build(s: Any = (rows, columns, dtype, config, cuda, backward)) -> Any:
                    return softmax_split.shares_launcher(*s)

                jobs += launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    nothing_spills(jobs)
    first = {job.kernel: job for job in reversed(jobs) if job.sm == 90}
    assert len(first) == 4
    for name, text in zip(first, ptx(list(first.values())), strict=True):
        wide = re.findall(r"(ld|st)\.global\S*\.v4\.b32", text)
        narrow = re.findall(r"(ld|st)\.global\S*\.b16", text)
        assert len(wide) >= 2, (name, text)
        assert len(narrow) <= 3, (name, text)  # the ends of a row
