"""float32 × float16 rounded in registers: right on a Hopper GPU whatever the range, refused elsewhere, compiled without spills."""

from __future__ import annotations

import math

import pytest
import torch

from tensorlogic.kernels.gemm.spec import Operand
from tensorlogic.kernels.triton_runtime import launch

pytest.importorskip("triton.experimental.gluon")
from tensorlogic.kernels.mixed_precision import mixed_gemm, mixed_gemm_kernel

from ...support.compiled import resources  # isort: skip

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")


def worst(y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dim: int) -> float:
    """The largest relative error of a row (1) or column (0)."""
    want = a.double() @ b.double()
    return float(((y.double() - want).norm(dim=dim) / want.norm(dim=dim)).max())


@hopper
@pytest.mark.parametrize("size", [(128, 256, 64), (264, 200, 328), (8, 8, 8), (1000, 136, 520)])
@pytest.mark.parametrize("rank", range(mixed_gemm.RANKS))
@pytest.mark.parametrize("left", [True, False])
def test_either_operand_and_any_layout(size: tuple[int, int, int], rank: int, left: bool) -> None:
    m, n, k = size
    for turned in ((False, False), (True, False), (False, True), (True, True)):
        shapes = [(m, k), (k, n)]
        a, b = (
            torch.randn(*(s[::-1] if t else s), device="cuda").to(
                torch.float32 if first == left else torch.float16
            )
            for s, t, first in zip(shapes, turned, (True, False), strict=True)
        )
        a, b = a.t() if turned[0] else a, b.t() if turned[1] else b
        y = mixed_gemm.product(rank, a, b)
        assert y is not None
        assert max(worst(y, a, b, 0), worst(y, a, b, 1)) < 1e-3


@hopper
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.parametrize(
    "kind", ["scaled", "late", "zeros first", "tiny", "denormal", "infinite", "none"]
)
def test_any_range(kind: str, left: bool) -> None:
    n = 256
    x, h = torch.randn(n, n, device="cuda"), torch.randn(n, n, device="cuda").half()
    along = torch.arange(n, device="cuda")
    if kind == "scaled":
        x = x * 10 ** torch.linspace(-20, 20, n, device="cuda")[:, None]
    elif kind == "late":
        x = torch.where(along > 200, x * 1e9, x)
    elif kind == "zeros first":
        x = torch.where(along < 128, 0.0, x * 1e-6)
    elif kind in ("tiny", "denormal"):
        x = x * (1e-30 if kind == "tiny" else 1e-40)
    elif kind == "infinite":
        x[5, 3] = math.inf
    a, b = (x, h) if left else (h, x.t().contiguous())
    y = mixed_gemm.product(0, a, b)
    assert y is not None
    if kind == "infinite":
        assert torch.equal(torch.isfinite(y), torch.isfinite(a.double() @ b.double()))
    else:
        assert worst(y, a, b, int(left)) < 1e-3


def test_what_bulk_copies_cannot_read_is_refused() -> None:
    x, w = Operand("f32", 64, 1), Operand("f16", 64, 1)
    assert mixed_gemm.described((64, 64, 64), x, w, (64, 1), mixed_gemm.SHAPES[0], 132) is not None
    for bad in (Operand("f32", 65, 1), Operand("f32", 32, 1), Operand("f32", 128, 2)):
        assert (
            mixed_gemm.described((64, 64, 64), bad, w, (64, 1), mixed_gemm.SHAPES[0], 132) is None
        )
    assert mixed_gemm.line(Operand("f16", 1, 68), 64, 64) is None  # columns begin at odd places
    assert mixed_gemm.product(0, torch.ones(8, 8), torch.ones(8, 8)) is None


def test_a_thread_keeps_its_registers() -> None:
    large = mixed_gemm.configs(4096, 4096, 4096, 132)[0]
    assert large[:2] == (2, 256)
    assert mixed_gemm.configs(512, 512, 512, 132)[0][:2] == (1, 64)
    x, w = Operand("f32", 4096, 1), Operand("f16", 4096, 1)
    found = mixed_gemm.described((4096, 4096, 4096), x, w, (4096, 1), large, 132)
    assert found is not None
    job = launch.compile_job(mixed_gemm_kernel.gemm_mixed, sm=90, **found)
    (used,) = resources([job])
    assert isinstance(used, launch.Resources)
    assert used.stack == 0
