"""Reductions over rows that are read side by side: kernels against float64, the candidate, what the compiler makes of it."""

from __future__ import annotations

import re
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
)

import tensorlogic  # isort: skip  (after the interpreter is asked for)
from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.system.compile_pool import CompileFailure  # isort: skip
from tensorlogic.core.op import OPS

from tensorlogic.core.candidate import Candidate  # isort: skip
from tensorlogic.kernels.triton_runtime import launch as triton_runtime_launch  # isort: skip
from tensorlogic.kernels.reduce import packed_rows as reduce_packed_rows  # isort: skip


from ...support.compiled import nothing_spills

from ...support.compiled import ptx  # isort: skip
from ...support.triton import default_device as default_device  # a fixture
from ...support.triton import small as small  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities
WANT: dict[str, Any] = {
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
}
TRIED = (
    {"BLOCK_R": 2, "parts": 3, "last": True, "num_warps": 4},  # several tiles a part
    {"BLOCK_R": 4, "parts": 2, "last": False, "num_warps": 8},
    {"BLOCK_R": 1, "parts": 1, "last": False, "num_warps": 4},
)


def reduced(kind: str, x: Tensor, dtype: str, config: dict[str, Any]) -> Tensor:
    """y of x [R, C], from a poisoned output and poisoned partial results; the counter is left at 0."""
    y = poisoned(x.shape[1], dtype=dtype)
    partials, count = reduce_packed_rows.abreast_workspace(x.shape[1], config)
    partial, counter = poisoned(partials), torch.zeros(count, dtype=torch.int32)
    launch = reduce_packed_rows.abreast_launcher(kind, dtype, *x.shape, config, DEVICE)
    assert launch(x, y, partial, counter)
    assert not counter.any()
    return y


def tried(columns: int, dtype: str) -> list[dict[str, Any]]:
    (abreast, line), *_ = reduce_packed_rows.rows_abreast(columns, dtype)
    return [{"ABREAST": abreast, "BLOCK_W": line, **config} for config in TRIED]


@pytest.mark.parametrize("shape", [(300, 3), (97, 17), (64, 54), (41, 101), (9, 333)])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("kind", WANT)
def test_reduce_rows_abreast(kind: str, dtype: str, shape: tuple[int, int]) -> None:
    x = rand(*shape, dtype=dtype)
    x[0, 0], x[-1, 1], x[5, 2] = float("nan"), float("inf"), float("-inf")
    want = WANT[kind](x.double()).to(TORCH[dtype])
    for config in tried(shape[1], dtype):
        close(reduced(kind, x, dtype, config), want, dtype, shape[0] ** 0.5)


def test_the_same_bits_every_time() -> None:
    x = rand(131, 17)
    for config in tried(17, "f32"):
        assert torch.equal(reduced("sum", x, "f32", config), reduced("sum", x, "f32", config))


@pytest.mark.parametrize("row", [0, 1, 7, 8, 39, 40, 69, 76])
@pytest.mark.parametrize("kind", ["max", "min", "sum"])
def test_no_element_is_left_out(kind: str, row: int) -> None:
    x = torch.zeros(77, 51, dtype=torch.float16)
    x[row] = torch.arange(1.0, 52.0) * (-1 if kind == "min" else 1)
    for config in tried(51, "f16"):
        assert torch.equal(reduced(kind, x, "f16", config), x[row])


def candidate(name: str) -> Candidate:
    candidate_loading.ready(DEVICE.type)
    return OPS[name].candidates["triton.abreast"]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("shape", [(3001, 17), (40, 20, 54), (200, 333)])
def test_its_configurations_are_right(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape).half()
    for name in WANT:
        op, served = OPS[name], candidate(name)
        key = op.key([x, tuple(range(x.dim() - 1)), False, False], "inference")
        assert 2 <= offered_are_right(op, served, key) <= 13


@pytest.mark.usefixtures("small")
def test_a_public_call_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    candidate("sum")
    served = launches(monkeypatch, reduce_packed_rows, "abreast_launcher")
    x = rand(900, 17, dtype="f16")
    with tensorlogic.policy(tune="off", force={"sum": "triton.abreast", "max": "triton.abreast"}):
        close(tensorlogic.sum(x, 0), x.double().sum(0), "f16", 30.0)
        assert torch.equal(tensorlogic.max(x, 0, keepdim=True), x.amax(0, keepdim=True))
    assert len(served) >= 2  # where launches are noted, to be made in C: twice each
    assert all(served)


@pytest.mark.usefixtures("small")
def test_what_is_left_to_others_is_named() -> None:
    said = candidate("sum").supports
    half = torch.zeros(900, 17).half()
    for x, dim, reason in (
        (torch.zeros(900, 16).half(), 0, "fill tiles"),
        (torch.zeros(900, 160).half(), 0, "fill tiles"),
        (torch.zeros(900, 5001).half(), 0, "too long"),
        (torch.zeros(9, 17).half(), 0, "too few rows"),
        (half, 1, "no leading dimension"),
        (torch.zeros(3, 300, 17).half(), 1, "no leading dimension"),
        (half[:, 1:], 0, "no leading dimension"),
        (half.flatten()[1:-16].view(-1, 17), 0, "16-byte address"),
    ):  # fmt: skip
        key = OPS["sum"].key([x, (dim,), False, False], "inference")
        assert reason in str(said(key)), (reason, said(key))
    assert said(OPS["sum"].key([half, (0,), False, False], "inference")) is None


def test_a_configuration_of_other_rows_is_refused() -> None:
    config = {"ABREAST": 24, "BLOCK_W": 512, **TRIED[0]}
    with pytest.raises(CompileFailure, match="does not fit 400 rows of 54"):
        reduce_packed_rows.abreast_launcher("sum", "f16", 400, 54, config, DEVICE)
    with pytest.raises(CompileFailure, match="does not fit 400 rows of 17"):
        reduce_packed_rows.abreast_launcher(
            "sum", "f16", 400, 17, {**config, "ABREAST": 27}, DEVICE
        )
    long = 24 * reduce_packed_rows.CHAIN * 2 * 3
    reduce_packed_rows.abreast_launcher("sum", "f16", long, 17, config, DEVICE)
    with pytest.raises(CompileFailure, match=f"does not fit {long + 24} rows of 17"):
        reduce_packed_rows.abreast_launcher("sum", "f16", long + 24, 17, config, DEVICE)


def test_it_compiles_without_spilling_and_in_wide_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm, columns, dtype, kind in (
        *((90, c, "f16", "max") for c in (3, 17, 54, 333, 501)),
        (90, 17, "f32", "mean"),
        (90, 1001, "f32", "sum"),
        (80, 17, "bf16", "sum"),
        (100, 17, "f16", "min"),
    ):
        monkeypatch.setattr(triton_runtime_launch, "_capability", lambda device, sm=sm: sm)
        for config in reduce_packed_rows.abreast_configs(103855, columns, dtype):

            def build(k: str = kind, d: str = dtype, c: int = columns, g: Any = config) -> Any:
                return reduce_packed_rows.abreast_launcher(k, d, 103855, c, g, cuda)

            jobs += triton_runtime_launch.collect(build, cuda)
    jobs = list(dict.fromkeys(jobs))
    nothing_spills(jobs)
    first = [job for job in jobs if job.sm == 90 and job.kernel == "reduce_abreast"][::6]
    for job, text in zip(first, ptx(first), strict=True):
        block, size = dict(job.constexprs), 4 if dict(job.signature)["x_ptr"] == "*fp32" else 2
        wide = block["BLOCK_R"] * block["BLOCK_W"] * size // (16 * 32 * job.num_warps)
        assert len(re.findall(r"ld\.global\S*\.v4\.b32", text)) == wide, (block, text)
