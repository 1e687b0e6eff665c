"""Products on AMX tiles, at sizes where they serve: every layout and element type, range, and what is not finite."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.native import cpu_library

from ...support.native import DTYPES, INF, LAYOUTS, NAN, assert_product, forced

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)


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


@pytest.mark.parametrize("lay", LAYOUTS)
def test_small_numbers_beside_others_are_lost_as_a_sum_loses_them(ops: Any, lay: Any) -> None:
    """What is tiny in rows whose largest numbers are not, as exponentials leave it, is no reason to do without tiles; whole rows and columns are."""
    a, b = torch.randn(300, 450), torch.randn(450, 200)
    a[:, ::3] *= torch.logspace(-45, 0, 150)
    b[1::3] *= torch.logspace(0, -42, 150)[:, None]
    a[17], b[:, 9] = 0.0, 0.0

    def error(x: Tensor, y: Tensor) -> Tensor:  # of each row and column, by their norms
        x, y, exact = x.double(), y.double(), x.double() @ y.double()
        sizes = x.norm(dim=1)[:, None] * y.norm(dim=0)
        return ((ops.matmul(lay(x.float()), lay(y.float())) - exact).abs() / sizes).nan_to_num()

    for rows, columns in itertools.product((1, 1e-15, 1e-25, 1e-30, 1e-36), repeat=2):
        if rows * columns < 1e-37:
            continue
        x, y = a.clone(), b.clone()
        x[5:9] *= rows
        y[:, 30:40] *= columns
        assert error(x, y).max() < 3e-7, (rows, columns)


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


@pytest.mark.parametrize(("parts", "limit"), [(1, 4e-3), (2, 1e-5), (3, 4e-7)])
@pytest.mark.parametrize("other", DTYPES)
def test_operands_are_rounded_while_they_are_packed(
    ops: Any, parts: int, limit: float, other: torch.dtype
) -> None:
    a, b = torch.randn(67, 600), torch.randn(600, 131).to(other)
    for lay_a, lay_b in itertools.product(LAYOUTS, LAYOUTS):
        for x, y in ((lay_a(a), lay_b(b)), (lay_b(b).mT, lay_a(a).mT)):
            want = x.double() @ y.double()
            error = (ops.matmul_f32(x, y, False, parts).double() - want).norm() / want.norm()
            assert error < limit
            if other == torch.float32:
                assert error > limit / 100  # it does what is cheaper
    with pytest.raises(RuntimeError, match="parts must be 0, 1, 2 or 3"):
        ops.matmul_f32(a, b, False, 4)


@pytest.mark.parametrize("value", [INF, NAN, 3.4e38])
def test_what_has_no_parts_is_multiplied_in_float32(ops: Any, value: float) -> None:
    a, b = torch.rand(100, 256) + 0.5, torch.rand(256, 200) + 0.5
    a[70, 9] = value
    b[9] = 1e-3
    for parts in (1, 2):
        found, wanted = ops.matmul_f32(a, b, False, parts), a @ b
        torch.testing.assert_close(found[70], wanted[70], equal_nan=True, rtol=1e-5, atol=0)


PACKED_SHAPES = (
    (1, 33, 40),
    (5, 300, 1100),
    (16, 47, 512),
    (40, 131, 600),
    (530, 70, 250),
    (33, 1, 5),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PACKED_SHAPES)
def test_weights_packed_once(ops: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    for lay, wide in itertools.product(LAYOUTS, (False, True)):
        x, w = torch.randn(m, k), lay(torch.randn(n, k).to(dtype))
        x = x if wide else x.to(dtype)
        tiles = ops.pack_weight(w)
        assert tiles.numel() > 0
        assert_product(ops.linear_packed(x, w, tiles), x, w.t())
    bias, residual = torch.randn(n).to(dtype), torch.randn(m, n).to(dtype)
    for code in range(5):
        found = ops.linear_packed(x.to(dtype), w, tiles, bias, residual, code)
        wanted = ops.linear(x.to(dtype), w, bias, residual, code)
        torch.testing.assert_close(found, wanted, rtol=4 * torch.finfo(dtype).eps, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_weights_and_what_leaves_the_range_of_tiles(ops: Any, dtype: torch.dtype) -> None:
    w = torch.rand(200, 256).add(0.5).to(dtype)
    tiles, near = ops.pack_weight(w), max(1e-5, 3 * torch.finfo(dtype).eps)
    for value in (INF, NAN, 3e38, 1e-42):
        for left in {dtype, torch.float32}:
            x = torch.rand(40, 256).add(0.5).to(left)
            x[7, 9] = value
            torch.testing.assert_close(
                ops.linear_packed(x, w, tiles), ops.linear(x, w), equal_nan=True, rtol=near, atol=0
            )
    for value in (INF, NAN, 3e38):
        spoilt, x = w.clone(), torch.rand(40, 256) + 0.5
        spoilt[9, 7] = value
        tiles = ops.pack_weight(spoilt)
        assert tiles.numel() == 0 or dtype == torch.bfloat16
        if tiles.numel():  # bfloat16 is multiplied as it is, unless the other side has parts
            for left in (x, x.to(dtype)):
                torch.testing.assert_close(
                    ops.linear_packed(left, spoilt, tiles),
                    ops.linear(left, spoilt),
                    equal_nan=True,
                    rtol=near,
                    atol=0,
                )


def test_packed_weights_are_bound_to_their_level_and_shape(ops: Any) -> None:
    x, w = torch.randn(40, 64), torch.randn(48, 64)
    tiles = ops.pack_weight(w)
    for wrong in (tiles[:-64], ops.pack_weight(torch.randn(48, 640))):
        with pytest.raises(RuntimeError, match="packed must be what pack_weight made"):
            ops.linear_packed(x, w, wrong)
    with pytest.raises(RuntimeError, match="two dimensions"):
        ops.pack_weight(torch.randn(4))
    cpu_library.op("set_isa")("avx512")  # serves all the same, and packs nothing
    assert ops.pack_weight(w).numel() == 0
    torch.testing.assert_close(ops.linear_packed(x, w, tiles), x @ w.t())
