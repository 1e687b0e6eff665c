"""Products of bfloat16 pairs of operands that are wider, rounded while they are packed; and what they are expected to take."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS
from tensorlogic.kernels.cpu import cost_model
from tensorlogic.mixed_precision import candidate_order, formats_cpu
from tensorlogic.native import cpu_library

CPU = torch.device("cpu")
needs_native = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)


@pytest.fixture
def pairs(avx512_bf16: None) -> Iterator[None]:
    before = cpu_library.op("set_isa")("avx512_bf16")
    formats_cpu.own_tiles.cache_clear()
    yield
    cpu_library.op("set_isa")(before)
    formats_cpu.own_tiles.cache_clear()


def product(a: Tensor, b: Tensor, parts: int = 3) -> Tensor:
    c: Tensor = cpu_library.op("matmul_f32")(a, b, False, parts)
    return c


SIZES = (
    (64, 64, 64),
    (100, 77, 1000),
    (130, 33, 769),
    (65, 35, 1537),
    (200, 50, 1),
    (70, 40, 3),
    (33, 20, 18),
)


@needs_native
@pytest.mark.parametrize("size", SIZES)
def test_rounded_as_they_are_packed_or_before(size: tuple[int, int, int], pairs: None) -> None:
    """The same bits, in every layout and mixture of dtypes."""
    m, n, k = size
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    for left, right in itertools.product(kinds, kinds):
        a, b = torch.randn(m, k).to(left), torch.randn(k, n).to(right)
        for turned in itertools.product((False, True), (False, True)):
            x = a.t().contiguous().t() if turned[0] else a
            y = b.t().contiguous().t() if turned[1] else b
            want = product(x.to(torch.bfloat16), y.to(torch.bfloat16))
            assert torch.equal(product(x, y, 1), want), (left, right, turned)
    spread = torch.randn(m, 3 * k)[:, ::3]
    b = torch.randn(2 * n, k).t()[:, ::2]
    want = spread.bfloat16().double() @ b.bfloat16().double()
    assert (product(spread, b, 1) - want).norm() < 1e-6 * want.norm()


@needs_native
def test_only_who_asks_has_operands_rounded(pairs: None) -> None:
    a, b = torch.randn(100, 300), torch.randn(300, 90)
    want = a.double() @ b.double()
    for parts in (0, 2, 3):
        assert (product(a, b, parts) - want).norm() < 1e-3 * want.norm()
    batch = torch.randn(3, 40, 64)
    assert torch.equal(product(batch, b[:64], 1), product(batch.bfloat16(), b[:64].bfloat16()))
    a[5] = 3.4e38  # beyond what bfloat16 rounds down: the row is infinite, which a guard sees
    assert not product(a, b, 1)[5].isfinite().any()
    assert product(a, b, 1)[6].isfinite().all()


def first(n: int, dtype: torch.dtype, rtol: float) -> str:
    """Which way is expected to be fastest before anything was timed."""
    op = OPS["matmul"].precise
    assert op is not None
    a = torch.empty(n, n, dtype=dtype)
    key = op.key((a, a, "none", False), "inference", "adaptive")
    return candidate_order.order(op, key, CPU, rtol)[0][0].id


@needs_native
@pytest.mark.parametrize("n", [512, 1000, 2048])
def test_bfloat16_without_hardware_is_not_expected_to_be_fast(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor with tiles, of which oneDNN may not use any: it emulates bfloat16, as timing shows."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True, raising=False)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    monkeypatch.setattr(formats_cpu, "own_tiles", lambda: False)
    monkeypatch.setattr(cpu_library, "isa", lambda: "avx512")
    monkeypatch.setattr(cost_model, "pairs", lambda dtype: False)
    monkeypatch.setattr(
        cost_model, "_factors", lambda dtype: (90.0 if dtype == "bf16" else 1.0, 1.0)
    )
    formats_cpu.tiles.cache_clear()
    try:
        assert not formats_cpu.tiles()
        assert first(n, torch.float32, 1e-2) not in ("torch.bf16", "cpu.bf16", EAGER)
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
        formats_cpu.tiles.cache_clear()
        assert formats_cpu.tiles()
    finally:
        formats_cpu.tiles.cache_clear()


@needs_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_are_expected_to_be_fastest_where_they_keep_the_budget(
    dtype: torch.dtype, pairs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats_cpu, "tiles", lambda: False)
    monkeypatch.setattr(cost_model, "_is_amd", lambda: True)  # whose pairs were timed without tiles
    monkeypatch.setattr(cost_model, "_factors", lambda dtype: (1.0, 1.0))
    for n in (512, 1000, 2048):
        assert first(n, dtype, 1e-2) == "cpu.bf16"
        assert first(n, dtype, 1e-5) == "cpu.f32"
