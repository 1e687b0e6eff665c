"""Products on AMX tiles, at sizes where they serve: every layout and element type, range, and what is not finite."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tensorlogic import native

from .test_native import DTYPES, INF, NAN, forced
from .test_native_products import LAYOUTS, assert_product

pytestmark = pytest.mark.skipif(native.available() is not None, reason=str(native.available()))


@pytest.fixture
def ops() -> Iterator[Any]:
    """The level with tiles; skips where the machine has none."""
    yield from forced("amx")


SHAPES = ((67, 131, 600), (530, 49, 250), (49, 600, 161), (14, 300, 1100))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_layout(ops: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
    for lay_a, lay_b in itertools.product(LAYOUTS, LAYOUTS):
        assert_product(ops.matmul(lay_a(a), lay_b(b)), a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_left_operand(ops: Any, dtype: torch.dtype) -> None:
    x, w = torch.randn(90, 333), torch.randn(200, 333).to(dtype)
    assert_product(ops.linear(x, w), x, w.t())


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e-20, 1e20, 1e30, 3e38])
def test_float32_keeps_its_range(ops: Any, scale: float) -> None:
    a, b = torch.rand(100, 450) * scale, torch.rand(450, 200) + 0.5
    for x, y in ((a, b), (a * 0.5, b / 450), (a, b * 1e-30), (a * b.mean(), b)):
        torch.testing.assert_close(ops.matmul(x, y), x @ y, rtol=3e-6, atol=0)


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", DTYPES)
def test_infinity_stays_infinity(ops: Any, dtype: torch.dtype, value: float) -> None:
    a, b = torch.rand(100, 256).add(0.5).to(dtype), torch.rand(256, 200).add(0.5).to(dtype)
    a[70, 9] = value
    for x, y in ((a, b), (a.t().contiguous().t(), b), (b.t(), a.t())):
        wanted = (x.float() @ y.float()).to(dtype)
        found = ops.matmul(x, y)
        bad = ~torch.isfinite(wanted)
        assert torch.equal(~torch.isfinite(found), bad)
        torch.testing.assert_close(found[bad], wanted[bad], equal_nan=True)
