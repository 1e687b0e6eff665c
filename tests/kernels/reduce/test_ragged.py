"""Reductions of rows that begin at odd places, in aligned groups: kernels against float64, the candidate, what the compiler makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

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
from tensorlogic.kernels.triton_runtime import launch  # isort: skip
from tensorlogic.kernels.reduce import ragged as reduce_ragged  # isort: skip


from ...support.compiled import nothing_spills  # isort: skip
from ...support.triton import default_device as default_device  # a fixture
from ...support.triton import small as small  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
SHAPES = ((1, 33), (9, 47), (5, 250), (10, 333), (2, 1029))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("kind", REDUCE)
def test_reduce_in_groups(kind: str, dtype: str, shape: tuple[int, int]) -> None:
    x = rand(*shape, dtype=dtype)
    if shape[0] > 4:  # at an end, in the groups; a row of -inf alone
        x[0, 0], x[1, 30], x[2, -1] = float("nan"), float("inf"), float("-inf")
        x[3] = float("-inf")
    want = REDUCE[kind](x.double()).to(TORCH[dtype])
    swept = {"strategy": "swept", "LANES": 32, "num_warps": 1}
    for config in [*reduce_ragged.groups_configs(shape[1], dtype), swept]:
        y = poisoned(shape[0], dtype=dtype)
        assert reduce_ragged.groups_launcher(kind, dtype, *shape, config, DEVICE)(x, y)
        close(y, want, dtype, shape[1] ** 0.5)


@pytest.mark.parametrize("column", [0, 1, 7, 8, 39, 40, 69, 76])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_no_element_is_left_out(kind: str, column: int) -> None:
    x = torch.zeros(8, 77, dtype=torch.float16)
    x[:, column] = 1.0 if kind == "max" else -1.0
    for config in [*reduce_ragged.groups_configs(77, "f16"), {"strategy": "swept", "LANES": 4, "num_warps": 4}]:  # fmt: skip
        y = poisoned(8, dtype="f16")
        assert reduce_ragged.groups_launcher(kind, "f16", 8, 77, config, DEVICE)(x, y)
        assert torch.equal(y, x[:, column])


def candidate(name: str) -> Candidate:
    candidate_loading.ready(DEVICE.type)
    return OPS[name].candidates["triton.groups"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(7, 333), (2, 3, 101), (3, 4099)])
def test_its_configurations_are_right(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).half()
    for name in REDUCE:
        op, served = OPS[name], candidate(name)
        args = [x, (x.dim() - 1,), False, False]
        key = op.key(args, "inference")
        assert 2 <= offered_are_right(op, served, key) <= 10


@pytest.mark.usefixtures("small")
def test_a_public_call_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate("sum")
    served = launches(monkeypatch, reduce_ragged, "groups_launcher")
    x = rand(6, 333, dtype="f16")
    with tensorlogic.policy(tune="off", force={"sum": "triton.groups", "max": "triton.groups"}):
        close(tensorlogic.sum(x, -1), x.double().sum(1), "f16", 20.0)
        assert torch.equal(tensorlogic.max(x, -1, keepdim=True), x.amax(1, keepdim=True))
    assert len(served) >= 2  # where launches are noted, to be made in C: twice each
    assert all(served)


@pytest.mark.usefixtures("small")
def test_what_is_left_to_others_is_named() -> None:
    said = candidate("sum").supports
    half = torch.zeros(9, 333).half()
    for x, dim, reason in (
        (torch.zeros(9, 336).half(), 1, "begin at 16-byte addresses"),
        (torch.zeros(9, 31).half(), 1, "too short"),
        (torch.empty(2, 333), 1, "fewer rows"),
        (half, 0, "no rows of contiguous memory"),
        (half[:, 1:], 1, "no rows of contiguous memory"),
        (half.flatten()[1:].view(4, -1), 1, "tensors at 16-byte addresses"),
    ):
        key = OPS["sum"].key([x, (dim,), False, False], "inference")
        assert reason in str(said(key)), (reason, said(key))
    assert said(OPS["sum"].key([half, (1,), False, False], "inference")) is None


def test_a_configuration_that_reads_too_little_is_refused() -> None:
    config = {"strategy": "held", "ROWS": 2, "num_warps": 4}
    with pytest.raises(CompileFailure, match="does not fit rows of 5003"):
        reduce_ragged.groups_launcher("sum", "f32", 4, 5003, config, DEVICE)


def test_it_compiles_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm, columns, dtype, kind in (
        *((90, c, "f16", "max") for c in (333, 1001, 8189, 28661)),
        (90, 333, "f32", "mean"),
        (80, 333, "bf16", "sum"),
        (100, 333, "f16", "min"),
    ):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)
        for config in reduce_ragged.groups_configs(columns, dtype):

            def build(k: str = kind, d: str = dtype, c: int = columns, g: Any = config) -> Any:
                return reduce_ragged.groups_launcher(k, d, 4096, c, g, cuda)

            jobs += launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    assert {job.kernel for job in jobs} == {"reduce_groups", "reduce_groups_swept"}
    nothing_spills(jobs)
