"""The Triton kernels of precision policies, in the interpreter where no GPU is: planes of halves, and what a guard sees."""

from __future__ import annotations

import math

import pytest
import torch

from tensorlogic import accuracy, registry

if registry.triton_missing() or not (torch.cuda.is_available() or registry.interpreting()):
    pytest.skip("needs Triton and a GPU or its interpreter", allow_module_level=True)

from tensorlogic.ops.common import triton_split, ways_cuda

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("count", [1, 3, 6])
@pytest.mark.parametrize("turned", [False, True])
def test_planes_add_up_to_the_product(count: int, turned: bool) -> None:
    a, b = torch.randn(37, 70, device=DEVICE), torch.randn(70, 45, device=DEVICE)
    if turned:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    left, right = ways_cuda.PLANES[count]
    x = triton_split.split(a, torch.float16, left, False)
    w = triton_split.split(b, torch.float16, right, True)
    assert x.shape == (37, count * 70)
    assert w.shape == (count * 70, 45)
    want = a.double() @ b.double()
    error = ((x.double() @ w.double() - want).norm() / want.norm()).item()
    assert error < {1: 1e-3, 3: 2e-6, 6: 1e-7}[count]
    assert not triton_split.noted(DEVICE)


def test_small_values_keep_their_lower_half() -> None:
    """1e-3's remainder lies below float16's normal range, where it is lifted out of."""
    x = torch.randn(20, 40, device=DEVICE) * 1e-3
    lifted = triton_split.split(x, torch.float16, (0, 1), False, 11).double()
    plain = triton_split.split(x, torch.float16, (0, 1), False).double()
    off = [
        float((p[:, :40] + p[:, 40:] / down - x.double()).norm() / x.double().norm())
        for p, down in ((lifted, 2048), (plain, 1))
    ]
    assert off[0] < 5e-7 < 1e-5 < off[1]


@pytest.mark.parametrize("bad", [float("inf"), float("nan"), 1e6])
def test_what_does_not_fit_is_noted_once(bad: float) -> None:
    a = torch.randn(20, 30, device=DEVICE)
    a[7, 3] = bad
    triton_split.split(a, torch.float16, (0,), False)
    assert triton_split.noted(DEVICE)
    assert not triton_split.noted(DEVICE)


@pytest.mark.parametrize("shape", [(40, 50, 60), (129, 300, 65)])
def test_a_guard_sees_on_a_gpu_what_it_sees_on_a_cpu(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = torch.randn(m, k, device=DEVICE), torch.randn(n, k, device=DEVICE).t()
    a[::3] *= 1e-3
    part = accuracy.Part(a, b)
    c = a @ b
    mine = accuracy.looked(part, c)
    assert mine == pytest.approx(accuracy.sketched(part, c), rel=1e-6)
    triton_split.flag(DEVICE).fill_(1)
    assert all(map(math.isinf, accuracy.looked(part, c)))
    assert all(map(math.isfinite, accuracy.looked(part, c)))
    c[3, 5] = float("nan")
    assert all(map(math.isinf, accuracy.looked(part, c)))
