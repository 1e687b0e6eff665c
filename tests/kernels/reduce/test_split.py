"""Reductions of few, long rows that programs share: kernels against float64, the candidate, what the compiler makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from ...support.triton import (
    DEVICE,
    REDUCE,
    TORCH,
    close,
    launches,
    offered_are_right,
    poisoned,
    rand,
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS

from tensorlogic.core.candidate import Candidate  # isort: skip
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # isort: skip
from tensorlogic.kernels.reduce import split as reduce_split  # isort: skip


from ...support.compiled import nothing_spills  # isort: skip
from ...support.triton import default_device as default_device  # a fixture
from ...support.triton import small as small  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
CONFIGS = (
    {"parts": 3, "LANES": 4, "num_warps": 4},  # shares of several tiles
    {"parts": 2, "LANES": 32, "num_warps": 1},  # of one, with room
    {"parts": 5, "LANES": 2, "num_warps": 4},  # the last one's share is nothing, or next to it
)


def reduced(kind: str, x: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """y of x [R, C], from a poisoned output and poisoned partial results; counters are left at 0."""
    y = poisoned(len(x), dtype=dtype)
    partials, count = reduce_split.shares_workspace(*x.shape, config)
    partial, counter = poisoned(partials), torch.zeros(count, dtype=torch.int32)
    launch = reduce_split.shares_launcher(kind, dtype, *x.shape, config, DEVICE)
    assert launch(x, y, partial, counter)
    assert not counter.any()
    return y


@pytest.mark.parametrize("shape", [(1, 65), (9, 71), (5, 131), (2, 250)])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("kind", REDUCE)
def test_reduce_by_shares(kind: str, dtype: str, shape: tuple[int, int]) -> None:
    x = rand(*shape, dtype=dtype)
    if shape[0] > 4:  # at an end, in the groups; a row of -inf alone
        x[0, 0], x[1, 30], x[2, -1] = float("nan"), float("inf"), float("-inf")
        x[3] = float("-inf")
    want = REDUCE[kind](x.double()).to(TORCH[dtype])
    for config in CONFIGS:
        close(reduced(kind, x, dtype, config), want, dtype, shape[1] ** 0.5)


def test_the_same_bits_every_time() -> None:
    x = rand(3, 131)
    for config in CONFIGS:
        assert torch.equal(reduced("sum", x, "f32", config), reduced("sum", x, "f32", config))


@pytest.mark.parametrize("column", [0, 7, 8, 15, 16, 31, 32, 47, 48, 69, 76])
@pytest.mark.parametrize("kind", ["max", "min", "sum"])
def test_no_element_is_left_out(kind: str, column: int) -> None:
    x = torch.zeros(8, 77, dtype=torch.float16)
    x[:, column] = -1.0 if kind == "min" else 1.0
    for config in CONFIGS:
        assert torch.equal(reduced(kind, x, "f16", config), x[:, column])


def candidate(name: str) -> Candidate:
    candidate_loading.ready(DEVICE.type)
    return OPS[name].candidates["triton.shares"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(8203,), (2, 9001), (2, 1, 8212)])
def test_its_configurations_are_right(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).half()
    for name in REDUCE:
        op, served = OPS[name], candidate(name)
        key = op.key([x, (x.dim() - 1,), False, False], "inference")
        assert 2 <= offered_are_right(op, served, key) <= 6


@pytest.mark.usefixtures("small")
def test_a_public_call_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate("sum")
    served = launches(monkeypatch, reduce_split, "shares_launcher")
    x = rand(2, 8203, dtype="f16")
    with tensorlogic.policy(tune="off", force={"sum": "triton.shares", "max": "triton.shares"}):
        close(tensorlogic.sum(x, -1), x.double().sum(1), "f16", 100.0)
        assert torch.equal(tensorlogic.max(x, -1, keepdim=True), x.amax(1, keepdim=True))
        odd = x.flatten()[:-1]
        close(tensorlogic.sum(odd), odd.double().sum(), "f16", 100.0)
    assert len(served) >= 3  # where launches are noted, to be made in C: twice each
    assert all(served)


@pytest.mark.usefixtures("small")
def test_what_is_left_to_others_is_named() -> None:
    said = candidate("sum").supports
    half = torch.zeros(2, 8203).half()
    for x, dim, reason in (
        (torch.zeros(2, 8208).half(), 1, "begin at 16-byte addresses"),
        (torch.zeros(2, 8191).half(), 1, "too short to be shared"),
        (torch.zeros(12, 8203).half(), 1, "12 programs need no others"),
        (half, 0, "no rows of contiguous memory"),
        (half[:, 1:], 1, "no rows of contiguous memory"),
        (half.flatten()[1:], 0, "tensors at 16-byte addresses"),
    ):
        key = OPS["sum"].key([x, (dim,), False, False], "inference")
        assert reason in str(said(key)), (reason, said(key))
    assert said(OPS["sum"].key([half, (1,), False, False], "inference")) is None


def test_a_configuration_of_other_rows_is_refused() -> None:
    config = {"parts": 3000, "LANES": 128, "num_warps": 4}
    with pytest.raises(CompileFailure, match="does not fit rows of 99999"):
        reduce_split.shares_launcher("sum", "f32", 4, 99999, config, DEVICE)


@pytest.mark.slow
def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm, rows, columns, dtype, kind in (
        (90, 1, 82030025, "f16", "max"),
        (90, 8, 50257, "f16", "sum"),
        (90, 3, 600001, "f32", "mean"),
        (80, 8, 50257, "bf16", "sum"),
        (100, 8, 50257, "f16", "min"),
    ):
        monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device, sm=sm: sm)
        for config in reduce_split.shares_configs(rows, columns, dtype):

            def build(s: Any = (kind, dtype, rows, columns, config, cuda)) -> Any:
                return reduce_split.shares_launcher(*s)

            jobs += triton_runtime_launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    nothing_spills(jobs)
