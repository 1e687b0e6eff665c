"""Group norm split over several programs, against float64: on a GPU, else in the interpreter; and its place in a graph."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

from tensorlogic.kernels.norm import group_norm as norm_group_norm
from tensorlogic.kernels.triton_runtime import launch
from tensorlogic.ops.group_norm import GROUP_NORM, _fits, split

from ...support.compiled import resources  # isort: skip

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [
    ((1, 6, 40, 41), 1),  # several parts, the last one short
    ((2, 8, 24, 25), 2),
    ((3, 4, 5, 7), 4),
    ((1, 3, 1), 1),
    ((2, 6, 9), 3),
]


def given(shape: tuple[int, ...], dtype: torch.dtype, last: bool, shift: float = 0.0) -> Any:
    torch.manual_seed(sum(shape))
    x = (torch.randn(shape, device=DEVICE) + shift).to(dtype)
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, *(torch.randn(shape[1], device=DEVICE).to(dtype) for _ in range(2))


def error(got: torch.Tensor, x: torch.Tensor, groups: int, *params: Any, eps: float) -> float:
    want = F.group_norm(x.double(), groups, *(p if p is None else p.double() for p in params), eps)
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("shape", "groups"), SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_it_is_group_norm(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, last: bool
) -> None:
    x, gamma, beta = given(shape, dtype, last)
    for params in ((gamma, beta), (gamma, None), (None, None), (None, beta)):
        got = split(x, groups, *params, 1e-3)
        assert got.stride() == x.stride()
        assert error(got, x, groups, *params, eps=1e-3) < (6e-4 if dtype == torch.float16 else 1e-6)


def test_a_mean_far_from_zero_costs_no_digits() -> None:
    x, gamma, beta = given((1, 4, 40, 40), torch.float32, False, 1000.0)
    plain = F.group_norm(x, 1, gamma, beta, 1e-5)
    ours = error(split(x, 1, gamma, beta, 1e-5), x, 1, gamma, beta, eps=1e-5)
    assert ours <= max(2 * error(plain, x, 1, gamma, beta, eps=1e-5), 1e-4)


def test_a_number_that_is_none_stays_in_its_group() -> None:
    x, gamma, beta = given((2, 8, 24, 25), torch.float32, False)
    x[1, 6, 3, 3] = torch.nan
    got, want = split(x, 2, gamma, beta, 1e-5), F.group_norm(x, 2, gamma, beta, 1e-5)
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, equal_nan=True)


def test_other_strides_are_taken_too() -> None:
    x, gamma, beta = given((2, 8, 12, 10), torch.float32, False)
    want = F.group_norm(x.transpose(2, 3), 2, gamma, beta, 1e-5)
    torch.testing.assert_close(split(x.transpose(2, 3), 2, gamma, beta, 1e-5), want)


def test_few_groups_are_cut_into_many_parts_and_many_are_not() -> None:
    assert norm_group_norm.parts_of(1, 64 * 56 * 56) == (196, 1024)
    assert norm_group_norm.parts_of(512, 10_000) == (1, 10_240)
    for rows, length in ((1, 1), (3, 1025), (7, 123_457), (1, 10**7)):
        parts, span = norm_group_norm.parts_of(rows, length)
        assert (parts - 1) * span < length <= parts * span
        assert parts * rows <= max(rows, norm_group_norm.PROGRAMS)


def test_what_it_cannot_take_is_said() -> None:
    x = torch.empty(1, 4, 2, 2, device="meta")
    assert _fits((x, 2, None, None, 1e-5)) == "a GPU only"
    assert [w.id for w in GROUP_NORM.ways] == ["triton.split"]


def test_they_compile_without_spilling(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, jobs = torch.device("cuda", 0), []
    for sm, last in ((90, False), (90, True), (80, True)):
        monkeypatch.setattr(launch, "_capability", lambda device, sm=sm: sm)

        def build(last: bool = last) -> object:
            return norm_group_norm.group_norm_launcher(
                1, 64, 56 * 56, 1, "f16", (True, True), last, cuda, 16
            )

        jobs += launch.collect(build, cuda)
    assert [job.kernel for job in jobs] == 3 * ["group_norm_parts", "group_norm_apply"]
    for job, answer in zip(jobs, resources(jobs), strict=True):
        assert isinstance(answer, launch.Resources), answer
        assert answer.stack == 0, (job, answer)
