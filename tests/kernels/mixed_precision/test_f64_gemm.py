"""Operands of unlike dtypes widened as they are multiplied: exact to float64, nothing allocated but the result, compiled without spills."""

from __future__ import annotations

import itertools
import os

import pytest
import torch

import tensorlogic
from tensorlogic.kernels.gemm.spec import Operand
from tensorlogic.kernels.triton_runtime import launch

pytest.importorskip("triton.experimental.gluon")
from tensorlogic.kernels.mixed_precision import f64_gemm, f64_gemm_kernel
from tensorlogic.mixed_precision import formats_cuda

from ...support.compiled import resources  # isort: skip

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MIB = 1 << 20


@hopper
@pytest.mark.parametrize("size", [(136, 264, 72), (8, 8, 8), (5, 200, 1032), (1000, 16, 520)])
@pytest.mark.parametrize("rank", range(f64_gemm.RANKS))
def test_any_pair_and_any_layout(size: tuple[int, int, int], rank: int) -> None:
    m, n, k = size
    for (one, other), turned in itertools.product(
        itertools.permutations(DTYPES, 2), itertools.product((False, True), repeat=2)
    ):
        a, b = (
            torch.randn(*(s[::-1] if t else s), device="cuda").to(d)
            for s, t, d in zip([(m, k), (k, n)], turned, (one, other), strict=True)
        )
        a, b = a.t() if turned[0] else a, b.t() if turned[1] else b
        y = f64_gemm.product(rank, a, b)
        lines = [
            (t.stride(1) if t.stride(0) == 1 else t.stride(0)) * t.element_size() for t in (a, b)
        ]
        if any(line % 16 for line in lines):
            assert y is None  # bulk copies cannot read it
            continue
        assert y is not None
        assert y.dtype == (torch.float64 if torch.float64 in (one, other) else torch.float32)
        want = a.double() @ b.double()
        torch.testing.assert_close(
            y, want.to(y.dtype), rtol=1e-6, atol=1e-6 if y.dtype == torch.float32 else 1e-10
        )


@hopper
@pytest.mark.skipif(
    "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ,
    reason="memory is counted, and graphs are captured, with PyTorch's own allocator",
)
@pytest.mark.parametrize("op", ["matmul", "linear"])
@pytest.mark.parametrize("pair", list(itertools.permutations(DTYPES, 2)))
def test_no_converted_copy_is_in_memory(op: str, pair: tuple[torch.dtype, torch.dtype]) -> None:
    n = 2048
    a, b = (torch.randn(n, n, device="cuda").to(d) for d in pair)
    call = getattr(tensorlogic, op)
    with tensorlogic.precision("f32"), tensorlogic.policy(force="triton.f64_widened"):
        call(a, b)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        y = call(a, b)
        torch.cuda.synchronize()
        assert torch.cuda.max_memory_allocated() - before <= y.numel() * y.element_size() + MIB
    want = a.double() @ (b if op == "matmul" else b.t()).double()
    assert float(((y.double() - want).norm(dim=1) / want.norm(dim=1)).max()) < 1e-6


def test_what_bulk_copies_cannot_read_is_refused() -> None:
    x, w, y = Operand("f32", 64, 1), Operand("f16", 64, 1), Operand("f32", 64, 1)
    shape = f64_gemm.SHAPES[0]
    assert f64_gemm.described((64, 64, 64), x, w, y, shape, 132) is not None
    assert f64_gemm.described((64, 64, 64), Operand("f32", 66, 1), w, y, shape, 132) is None
    assert f64_gemm.product(0, torch.ones(8, 8, dtype=torch.int32), torch.ones(8, 8)) is None


def test_few_rows_get_small_tiles() -> None:
    assert f64_gemm.configs(4096, 4096, 132)[0][:2] == (128, 128)
    assert f64_gemm.configs(1, 4096, 132)[0][:2] == (16, 32)


def test_a_thread_keeps_its_registers() -> None:
    jobs = []
    for shape, across in itertools.product(f64_gemm.SHAPES, (True, False)):
        lies = [Operand(d, *((4096, 1) if across else (1, 4096))) for d in ("f16", "f32")]
        found = f64_gemm.described((4096, 4096, 4096), *lies, Operand("f32", 4096, 1), shape, 132)
        assert found is not None
        jobs.append(launch.compile_job(f64_gemm_kernel.gemm_widened, sm=90, **found))
    for job, used in zip(jobs, resources(jobs), strict=True):
        assert isinstance(used, launch.Resources), used
        assert used.stack == 0, job


def test_a_policy_that_keeps_no_copy_refuses_those_that_do(monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorlogic.core.key import Key, TensorSpec

    def key(precision: str, *dtypes: str, n: int = 2048) -> Key:
        specs = tuple(TensorSpec(d, (n, n), (n, 1)) for d in dtypes)
        return Key("matmul", specs, ("a", "b"), (), "cuda", "inference", precision)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    ways = {w.id: w.serves for w in formats_cuda.found()}

    def serving(*args: str, n: int = 2048) -> set[str]:
        asked = key(*args, n=n)
        kept = {"triton.f64", "triton.f64_widened", "cublaslt.f32"}
        return {id for id in kept if ways[id](asked) is None}

    own = {"triton.f64_widened"}
    assert (
        serving("f32", "f16", "f32")
        == serving("f32", "bf16", "f16")
        == serving("f32", "f64", "f16")
        == own
    )
    assert serving("f32", "f32", "f32") == serving("f32", "f16", "f16") == own | {"cublaslt.f32"}
    assert serving("adaptive", "f16", "f32") == own | {"cublaslt.f32", "triton.f64"}
    assert serving("f32", "f16", "f32", n=128) == own | {"cublaslt.f32", "triton.f64"}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert serving("f32", "f16", "f32") == {"cublaslt.f32", "triton.f64"}
