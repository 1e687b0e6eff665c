"""Products of cuBLASLt under precision policies, prepared once for what lies alike."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from tensorlogic.core.key import Key, TensorSpec
from tensorlogic.mixed_precision import product_sites
from tensorlogic.system import hardware

if hardware.triton_missing() or not (torch.cuda.is_available() or hardware.interpreting()):
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from tensorlogic.kernels.gemm import cublaslt as gemm_cublaslt
from tensorlogic.mixed_precision import cublaslt_sequence, formats_cuda
from tensorlogic.mixed_precision.cublaslt_sequence import Planes, Step
from tensorlogic.system.compile_pool import CompileFailure

from ..support.driver.cublaslt import Library

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = (torch.float32, torch.float64, torch.float16)


def laid(t: Tensor, how: str) -> Tensor:
    if how == "turned":
        return t.t().contiguous().t()
    if how == "unaligned":
        big = torch.empty(t.shape[0], t.shape[1] + 3, dtype=t.dtype, device=t.device)
        big[:, 1:-2].copy_(t)
        return big[:, 1:-2]
    if how == "apart":
        big = torch.empty(t.shape[0], 2 * t.shape[1], dtype=t.dtype, device=t.device)
        big[:, ::2].copy_(t)
        return big[:, ::2]
    return t


def multiplied(made: Any, x: Tensor, w: Tensor, sizes: tuple[int, int], depth: int) -> Tensor:
    """What the strides that were given make of x and w."""
    (m, n), s = sizes, made.strides
    left = torch.as_strided(x, (m, depth), s[:2], x.storage_offset())
    right = torch.as_strided(w, (depth, n), s[2:], w.storage_offset())
    return left.double() @ right.double()


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("how", [("as it is", "turned"), ("unaligned", "apart"), ("turned", "unaligned")])  # fmt: skip
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.float64)])  # fmt: skip
def test_planes_are_matrices_by_their_strides(
    count: int, how: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    m, n, k = 20, 36, 28
    a = laid(torch.randn(m, k, device=DEVICE).to(dtypes[0]), how[0])
    b = laid(torch.randn(k, n, device=DEVICE).to(dtypes[1]), how[1])
    a, b = (t if t.dtype != torch.float16 or 1 in t.stride() else t.contiguous() for t in (a, b))
    made = Planes(torch.float16, *formats_cuda.PLANES[count]).made(a, b)
    x, w = made.make(a, b)
    assert all(t.data_ptr() % made.align == 0 for t in (x, w))
    kept = count == 1
    assert (x is a) == (kept and dtypes[0] == torch.float16)
    assert (w is b) == (kept and dtypes[1] == torch.float16)
    want = a.double() @ b.double()
    got = multiplied(made, x, w, (m, n), count * k)
    assert (got - want).norm() < (1e-3 if kept else 1e-6) * want.norm()


def test_runs_cover_the_inner_dimension_once() -> None:
    steps = formats_cuda._in_runs(1000)
    assert steps[0] == Step(0, 2000, 2.0**-11)
    assert [(s.start, s.depth) for s in steps[1:]] == [(2000, 384), (2384, 384), (2768, 232)]
    assert [s.depth for s in formats_cuda._in_runs(770)] == [1540, 320, 320, 130]
    assert formats_cuda._all(3, 1000) == [Step(0, 3000)]


def test_what_the_library_refuses_is_computed_in_float64() -> None:
    met: list[tuple[int, ...]] = []

    def make(rank: int, a: Tensor, b: Tensor) -> cublaslt_sequence.Run:
        met.append((rank, *a.shape))
        if a.shape[0] == 3:
            raise CompileFailure("too small")
        return lambda a, b: (a @ b) * 0

    product = cublaslt_sequence.Prepared(make)
    a, b = torch.randn(3, 5), torch.randn(5, 4)
    for _ in range(2):
        torch.testing.assert_close(product(a, b, 1), a @ b)
        assert (product(b, b.t().contiguous()) == 0).all()
    assert met == [(1, 3, 5), (0, 5, 4)]


COUNT = itertools.count()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    found = Library()
    monkeypatch.setattr(gemm_cublaslt, "_library", lambda: found)
    monkeypatch.setattr(gemm_cublaslt, "_handle", lambda lib, index: 1)
    monkeypatch.setattr(gemm_cublaslt, "_workspace", lambda index, queue, size: torch.empty(size))
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the library itself is there")
@pytest.mark.parametrize("how", [("as it is", "as it is"), ("turned", "unaligned"), ("unaligned", "turned")])  # fmt: skip
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.float32), (torch.float16, torch.float32), (torch.float64, torch.float16)])  # fmt: skip
def test_offsets_scales_and_turns_are_those_of_the_product(
    how: tuple[str, str], dtypes: tuple[torch.dtype, torch.dtype], library: Library
) -> None:
    m, n, k = 40 + next(COUNT), 52, 410  # what lies alike is prepared once a process
    a, b = laid(torch.randn(m, k).to(dtypes[0]), how[0]), laid(torch.randn(k, n).to(dtypes[1]), how[1])  # fmt: skip
    want = a.double() @ b.double()
    ways = {w.id: w for w in formats_cuda.found()}
    for id, limit, calls in (
        ("cublaslt.f16x3", 1e-6, 3),
        ("cublaslt.f32", 1e-6, 1),
        ("cublaslt.f16_unscaled", 1e-3, 1),
    ):
        fresh = ways[id].product
        for turn in range(2):
            before = len(library.workspaces)
            got = fresh(a, b).double()
            assert (got - want).norm() <= limit * want.norm(), (id, turn)
            assert library.workspaces[before:] == [64] * calls


@gpu
@pytest.mark.parametrize("how", [("as it is", "as it is"), ("turned", "as it is"), ("unaligned", "turned"), ("apart", "unaligned")])  # fmt: skip
@pytest.mark.parametrize("size", [(64, 128, 96), (100, 1001, 777), (1, 300, 512)])
def test_every_way_of_the_library(size: tuple[int, int, int], how: tuple[str, str]) -> None:
    m, n, k = size
    limits = {
        "cublaslt.f32": 2e-6, "cublaslt.f16x3": 2e-6, "cublaslt.bf16x3": 3e-5, "cublaslt.tf32": 2e-3,
        "cublaslt.f16": 2e-3, "cublaslt.f16_unscaled": 2e-3, "cublaslt.bf16": 1e-2, "triton.f64": 1e-12,
    }  # fmt: skip
    ways = {w.id: w for w in formats_cuda.found()}
    for left, right in ((d, e) for d in DTYPES for e in DTYPES):
        a = laid(torch.randn(m, k, device=DEVICE).to(left), how[0])
        b = laid(torch.randn(k, n, device=DEVICE).to(right), how[1])
        want = a.double() @ b.double()
        for id, limit in limits.items():
            if id == "triton.f64" and torch.float64 in (left, right):
                continue
            for _ in range(2):
                got = ways[id].product(a, b).double()
                assert (got - want).norm() <= limit * want.norm(), (id, left, right)


def test_library_calls_count_for_a_callers_thread() -> None:
    ways = {w.id: w.us for w in formats_cuda.found()}

    def us(name: str, n: int) -> float:
        return ways[f"cublaslt.{name}"](n, n, n, "f32")

    assert us("bf16x3", 1000) < us("f32", 1000) < us("f16x3", 1000)  # one call, one, four
    assert us("f16x3", 2048) < us("f32", 2048)  # there the GPU is what is waited for
    assert us("tf32", 64) > formats_cuda.LIBRARY_US
    wide, narrow = (
        Key("matmul", (spec, spec), ("a", "b"), (), "cuda", "inference", "adaptive")
        for spec in (TensorSpec(dtype, (64, 64), (64, 1)) for dtype in ("f64", "f32"))
    )
    assert product_sites.eager_us(wide, 2e9) == product_sites.eager_us(narrow, 2e9) == 48.0
    assert product_sites.eager_us(wide, 1e6) < us("f32", 64) < product_sites.eager_us(narrow, 1e6)
