"""Products in whole numbers of steps: as accurate as that many steps allow, in float32 where numbers do not go into them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tensorlogic.kernels.cpu import cost_model
from tensorlogic.mixed_precision import error_statistics, formats_cpu
from tensorlogic.native import cpu_library

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)
LEVELS = ("avx2", "avx512")
STEPS = 2364


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param not in cost_model.features():
        pytest.skip(f"no {request.param} here")
    before = cpu_library.op("set_isa")(request.param)
    if formats_cpu._steps("cpu") is not None:
        cpu_library.op("set_isa")(before)
        pytest.skip("no products of 16 bits here")
    yield request.param
    cpu_library.op("set_isa")(before)


def product(a: Tensor, b: Tensor) -> Tensor:
    c: Tensor = cpu_library.op("matmul_f32")(a, b, False, 0)
    return c


def off(c: Tensor, a: Tensor, b: Tensor) -> float:
    want = a.double() @ b.double()
    return float(((c - want).norm(dim=1) / want.norm(dim=1)).max())


SIZES = ((64, 64, 64), (100, 77, 1000), (130, 33, 385), (65, 5, 3), (200, 50, 1), (70, 3, 500))


@pytest.mark.parametrize("size", SIZES)
def test_every_layout_and_dtype_is_as_accurate_as_its_steps(
    size: tuple[int, int, int], level: str
) -> None:
    m, n, k = size
    for dtype, left, right in itertools.product(
        (torch.float32, torch.float64, torch.float16), (False, True), (False, True)
    ):
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        a = a.t().contiguous().t() if left else a
        b = b.t().contiguous().t() if right else b
        assert (product(a, b) - a.double() @ b.double()).norm() < 8e-4 * (
            a.double() @ b.double()
        ).norm()
    spread = torch.randn(m, 2 * k)[:, ::2]
    most = 2e-3 if n > 3 else 6e-3  # rows of three elements may all be small
    assert off(product(spread, b.float()), spread, b.float()) < most


def test_rows_and_columns_have_steps_of_their_own(level: str) -> None:
    a = torch.randn(130, 500) * torch.logspace(-9, 9, 130)[:, None]
    b = torch.randn(500, 90) * torch.logspace(-4, 4, 90)
    b[:, 7] = 0
    c = product(a, b)
    want = a.double() @ b.double()
    for dim in (0, 1):
        size = want.norm(dim=dim)
        assert ((c - want).norm(dim=dim) <= 5e-3 * size).all()
    exact = torch.randint(-9, 10, (70, 384)).float()
    assert off(product(exact, exact.t().contiguous()), exact, exact.t()) < 1e-3
    most = torch.full((64, 384), 3.0)  # every product is the largest there is
    assert torch.allclose(product(most, most.t().contiguous()), torch.tensor(384 * 9.0))


@pytest.mark.parametrize("value", [1e4, math.nan, math.inf, 1e-38])
@pytest.mark.parametrize("side", [0, 1])
def test_what_does_not_go_into_steps_is_multiplied_in_float32(
    value: float, side: int, level: str
) -> None:
    a, b = torch.randn(96, 400), torch.randn(64, 400).t()  # whose panels are as deep as any
    given = (a, b)[side]
    if value == 1e-38:
        given.mul_(value)
    else:
        given[17, 19] = value
    want = cpu_library.op("matmul_f32")(a, b)
    assert torch.equal(product(a, b).nan_to_num(7.0), want.nan_to_num(7.0))
    assert not math.isfinite(value) or off(want.double(), a, b) < 1e-5


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("depth", [33, 130, 400, 512])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_others_keep_their_digits_beside_large_elements(
    count: int, depth: int, side: int, level: str
) -> None:
    """Which the result does not tell of; also where few elements are left for a last panel, whatever the root of its mean square is."""
    a, b = torch.randn(96, depth), torch.randn(64, depth).t()
    large, other = ((a, b), (b.t(), a.t()))[side]
    large[17, -count:] *= 1e3
    other[-count:] *= 1e-3
    assert off(product(a, b), a, b) < 5e-3
    assert off(product(b.t(), a.t()), b.t(), a.t()) < 5e-3


def test_a_row_of_zeros_hides_nothing(level: str) -> None:
    a, b = torch.randn(96, 100), torch.randn(100, 64)
    a[17] = 0
    assert off(product(a, b)[torch.arange(96) != 17], a[torch.arange(96) != 17], b) < 2e-3
    assert not product(a, b)[17].any()
    a[17, 3] = math.nan
    assert bool(product(a, b)[17].isnan().all())


def test_what_it_is_said_to_bring_covers_the_largest_crest_that_it_takes() -> None:
    crest, depth = 14.0, 8 * 14.0  # as csrc/kernels/fixed_point.h
    crest /= 1 - crest / depth  # over the mean size of the others
    worst = math.sqrt(2) * crest / (STEPS * math.sqrt(12))
    assert worst <= 1.01 * error_statistics.TYPICAL["i16"] < 4e-3
