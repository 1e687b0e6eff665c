"""The native kernels over rows and their reductions against float64, each instruction set in turn."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensorlogic.native import cpu_library

from ...support.helpers import far_rows
from ...support.native import (
    DTYPES,
    INF,
    NAN,  # the fixture
)
from ...support.native import ops as ops  # a fixture

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)

SHAPES = ((1, 1), (3, 5), (2, 3, 17), (5, 1023), (33, 64), (0, 4), (130, 260), (2, 4097))


def close(y: Tensor, reference: Tensor, dtype: torch.dtype, factor: float = 3) -> None:
    """Within `factor` roundings of `dtype` of float64, absolutely so for values below one."""
    bound = factor * torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), reference, rtol=bound, atol=bound)


@pytest.mark.parametrize("dtype", DTYPES)
def test_layer_norm_and_its_gradient(ops: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, n = (torch.randn(shape) * 2 + 16).to(dtype), shape[-1]
        gamma, beta, dy = (
            torch.randn(n).to(dtype),
            torch.randn(n).to(dtype),
            torch.randn(shape).to(dtype),
        )
        wide = [t.double().requires_grad_() for t in (x, gamma, beta)]
        wanted = F.layer_norm(wide[0], (n,), wide[1], wide[2], 1e-5)
        y, mean, rstd = ops.layer_norm(x, gamma, beta, 1e-5, dtype)
        close(y, wanted.detach(), dtype, 64 if dtype == torch.float32 else 3)
        close(
            ops.layer_norm(x, gamma, beta, 1e-5, torch.float32)[0],
            wanted.detach(),
            torch.float32,
            64,
        )
        close(
            ops.layer_norm(x, None, None, 1e-5, dtype)[0],
            F.layer_norm(wide[0], (n,)).detach(),
            dtype,
            64 if dtype == torch.float32 else 3,
        )
        if n == 1 or 0 in shape:
            continue
        grads = torch.autograd.grad(wanted, wide, dy.double())
        for got, exact in zip(
            ops.layer_norm_backward(dy, x, gamma, mean, rstd), grads, strict=True
        ):
            scale = max(1.0, exact.abs().max().item())
            close(got / scale, exact / scale, dtype, 64 if dtype == torch.float32 else 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [0.0, 8.0, 60.0, 1e3, -4e4, 3e18])
def test_layer_norm_of_any_mean(ops: Any, mean: float, dtype: torch.dtype) -> None:
    """Sums of squares lose digits, or overflow, where the mean is large beside the spread: then they are not what serves."""
    if mean > torch.finfo(dtype).max:
        pytest.skip(f"{dtype} has no {mean:g}")
    spread = max(1.0, abs(mean) * 8 * torch.finfo(dtype).eps)
    for n in (5, 64, 2049):
        x = (mean + spread * torch.randn(3, n).double()).to(dtype)
        wanted = F.layer_norm(x.double(), (n,))
        # what is lost of the mean itself in float32 is lost once: an eps of it, beside the spread
        lost = 8 * torch.finfo(torch.float32).eps * (1 + abs(mean) / spread)
        for out in (dtype, torch.float32):
            y = ops.layer_norm(x, None, None, 1e-5, out)[0].double()
            bound = 3 * torch.finfo(out).eps + lost
            torch.testing.assert_close(y, wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("size", [3e2, 6e4, 1e9, 1e30])
def test_large_numbers_do_not_cost_softmax_its_digits(ops: Any, size: float) -> None:
    """The largest is subtracted before anything is rounded: numbers of any size, close to it and far below."""
    for dtype in (d for d in DTYPES if size < torch.finfo(d).max):
        x = (size * (1 - torch.rand(5, 173) ** 8 / 16)).to(dtype)
        wanted = torch.softmax(x.double(), -1)
        close(ops.softmax(x, None, 1.0, False, dtype), wanted, dtype)
        peak, none = x.argmax(1), cpu_library.REDUCTIONS["none"]
        loss, _ = ops.softmax_cross_entropy(x, peak, -100, 0.0, none)
        close(loss, F.cross_entropy(x.double(), peak, reduction="none"), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_and_its_gradient(ops: Any, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        x, dy = (torch.randn(shape) * 5).to(dtype), torch.randn(shape).to(dtype)
        wide = x.double().requires_grad_()
        wanted = torch.softmax(0.5 * wide, -1)
        y = ops.softmax(x, None, 0.5, False, dtype)
        close(y, wanted.detach(), dtype)
        close(ops.softmax(x.float(), None, 0.5, False, dtype), wanted.detach(), dtype)
        (exact,) = torch.autograd.grad(wanted, wide, dy.double())
        close(ops.softmax_backward(dy, y, 0.5), exact, dtype, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_short_rows(ops: Any, dtype: torch.dtype) -> None:
    """Several side by side: each has its own sum, whatever else is in it, and a last group may be ragged."""
    for n in (1, 2, 3, 5, 8, 12, 15, 16, 24, 31, 32):
        for rows in (1, 7, 53):
            x, dy = (4 * torch.randn(rows, n)).to(dtype), torch.randn(rows, n).to(dtype)
            if rows > 7:
                x[3, n - 1], x[4], x[9, 0], x[11], x[12] = NAN, -INF, INF, 1e4, -1e4
            want = torch.softmax(0.5 * x.double(), -1)
            y = ops.softmax(x, None, 0.5, False, dtype)
            assert torch.equal(y.isnan(), want.isnan())
            close(y.nan_to_num(), want.nan_to_num(), dtype)
            alias = x.clone()
            ops.softmax_(alias, None, 0.5, False)
            assert torch.equal(alias.nan_to_num(), y.nan_to_num())
            y = want.nan_to_num().to(dtype)
            wide = y.double()
            dx = 0.5 * wide * (dy.double() - (wide * dy.double()).sum(-1, keepdim=True))
            close(ops.softmax_backward(dy, y, 0.5), dx, dtype, 6)


def test_long_rows_of_softmax_gradients_do_not_drift(ops: Any) -> None:
    """One chain of float32 sums a lane would be off by ten times as much and more where vectors are short."""
    y = torch.softmax(torch.randn(1, 1 << 18), -1)
    dy = torch.rand_like(y) + 10
    exact = y.double() * (dy.double() - (dy.double() * y.double()).sum())
    off = (ops.softmax_backward(dy, y, 1.0).double() - exact).abs() / y
    assert off.max() < 10 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "mask_shape", [(19, 37), (2, 1, 19, 37), (2, 3, 19, 37), (1, 37), (37,), (3, 1, 37)]
)
def test_masked_and_causal_scores(
    ops: Any, dtype: torch.dtype, mask_shape: tuple[int, ...]
) -> None:
    x = torch.randn(2, 3, 19, 37).to(dtype)
    added, keep = torch.randn(mask_shape).to(dtype), torch.rand(mask_shape) > 0.3
    keep[..., 0] = True
    causal = torch.ones(19, 37, dtype=torch.bool).tril()
    wide = 0.3 * x.double()
    close(ops.softmax(x, added, 0.3, False, dtype), torch.softmax(wide + added.double(), -1), dtype)
    close(
        ops.softmax(x, added.float(), 0.3, False, dtype),
        torch.softmax(wide + added.double(), -1),
        dtype,
    )
    both = torch.softmax(wide.masked_fill(~(keep & causal), -INF), -1)
    close(ops.softmax(x, keep, 0.3, True, dtype), both, dtype)
    scores = x.float()
    ops.softmax_(scores, keep, 0.3, True)
    close(scores, both, torch.float32)


def test_softmax_of_nothing_and_of_infinity_is_torchs(ops: Any) -> None:
    for row in ([-INF, -INF, -INF], [INF, 0.0, 1.0], [NAN, 0.0, 1.0], [-INF, 0.0, 1.0]):
        x = torch.tensor(row * 7)
        torch.testing.assert_close(
            ops.softmax(x, None, 1.0, False, x.dtype), torch.softmax(x, -1), equal_nan=True
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_softmax_cross_entropy(
    ops: Any, dtype: torch.dtype, reduction: str, smoothing: float
) -> None:
    number = cpu_library.REDUCTIONS[reduction]
    for rows, classes in ((1, 1), (7, 5), (33, 65), (16, 5003)):
        logits, target = (torch.randn(rows, classes) * 4).to(dtype), torch.randint(classes, (rows,))
        target[rows // 2 :: 3] = -100 if rows > 1 else target[0]
        wide = logits.double().requires_grad_()
        wanted = F.cross_entropy(wide, target, label_smoothing=smoothing, reduction=reduction)
        loss, lse = ops.softmax_cross_entropy(logits, target, -100, smoothing, number)
        scale = max(1.0, wanted.abs().max().item())
        close(loss / scale, wanted.detach() / scale, dtype)
        live = target != -100
        close(lse[live] / 16, torch.logsumexp(wide.detach(), 1)[live] / 16, torch.float32, 8)
        dloss = torch.randn(loss.shape).to(dtype)
        (exact,) = torch.autograd.grad(wanted, wide, dloss.double())
        got = ops.softmax_cross_entropy_backward(
            dloss, logits, target, lse, -100, smoothing, number
        )
        close(got, exact, dtype, 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 5, 40, 1003])
def test_no_loss_is_below_zero(ops: Any, dtype: torch.dtype, columns: int) -> None:
    """The largest logit's own share is 1, however powers are approximated."""
    x, target = torch.full((8, columns), -40.0), torch.arange(8) % columns
    x[torch.arange(8), target] = torch.randn(8)
    loss, _ = ops.softmax_cross_entropy(
        x.to(dtype), target, -100, 0.0, cpu_library.REDUCTIONS["none"]
    )
    assert (loss >= 0).all()
    assert loss.max() < 1e-6
    x[3] = NAN
    loss, _ = ops.softmax_cross_entropy(
        x.to(dtype), target, -100, 0.0, cpu_library.REDUCTIONS["none"]
    )
    assert loss.isnan().tolist() == [i == 3 for i in range(8)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [5, 65, 5003])
def test_smoothed_cross_entropy_of_logits_far_from_zero(
    ops: Any, dtype: torch.dtype, columns: int
) -> None:
    x, t = far_rows(columns, dtype)
    want = F.cross_entropy(x.double(), t, reduction="none", label_smoothing=0.1)
    loss, _ = ops.softmax_cross_entropy(x, t, -100, 0.1, cpu_library.REDUCTIONS["none"])
    torch.testing.assert_close(loss.float(), want.to(dtype).float(), rtol=2e-5 + torch.finfo(dtype).eps, atol=1e-5)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_cross_entropy_of_rows_that_rise_and_of_excluded_classes(
    ops: Any, dtype: torch.dtype
) -> None:
    classes = 9001
    rise = torch.linspace(-400, 400, classes)
    late = torch.full((classes,), -INF)
    late[8000:] = torch.randn(1001)
    sparse = torch.randn(classes) * 20
    sparse[::2] = -INF
    rows = [rise, rise.flip(0), late, sparse, rise * 1e-3 - 300, rise + (rise > 0) * 80]
    logits, target = torch.stack(rows).to(dtype), torch.full((6,), 8001)
    loss, lse = ops.softmax_cross_entropy(logits, target, -100, 0.0, cpu_library.REDUCTIONS["none"])
    exact = torch.logsumexp(logits.double(), 1)
    torch.testing.assert_close(lse.double(), exact, rtol=2e-7, atol=1e-6)
    close(loss / 800, (exact - logits[:, 8001].double()) / 800, dtype)
    for bad in (NAN, INF):
        for place in (0, 300, 9000):
            spoilt = logits.clone()
            spoilt[:, place] = bad
            lost = ops.softmax_cross_entropy(
                spoilt, target, -100, 0.0, cpu_library.REDUCTIONS["none"]
            )
            assert lost[0].isnan().all()
    nothing = torch.full((1, 600), -INF).to(dtype)
    assert ops.softmax_cross_entropy(nothing, target[:1] % 600, -100, 0.0, 1)[1].item() == -INF


def test_target_out_of_bounds_is_named(ops: Any) -> None:
    for bad in (5, -1):
        with pytest.raises(RuntimeError, match=f"Target {bad} is out of bounds"):
            ops.softmax_cross_entropy(torch.ones(2, 5), torch.tensor([0, bad]), -100, 0.0, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_reductions(ops: Any, dtype: torch.dtype, name: str) -> None:
    exact = {"sum": torch.sum, "mean": torch.mean, "max": torch.amax, "min": torch.amin}[name]
    reduce = getattr(ops, name)
    for shape in ((1,), (5, 7), (3, 1025), (2, 100_001), (1200, 33), (3, 5, 100, 2)):
        x = torch.randn(shape).to(dtype)
        for begin, end in (
            (0, x.dim()),
            (x.dim() - 1, x.dim()),
            (0, 1),
            (max(x.dim() - 2, 0), x.dim() - 1),
        ):
            dims = tuple(range(begin, end))
            wanted = exact(x.double(), dims, keepdim=True) if dims else x.double()
            scale = x.double().norm().item() if name == "sum" and dims else 1.0
            got = reduce(x, begin, end, True)
            assert got.shape == wanted.shape
            close(got / max(scale, 1), wanted / max(scale, 1), dtype)
            assert torch.equal(reduce(x, begin, end, False).flatten(), got.flatten())


def test_nan_wins_and_empty_sums_are_torchs(ops: Any) -> None:
    for at in (0, 17, 99):
        x = torch.randn(100, 3)
        x[at, 1] = NAN
        for reduce in (ops.max, ops.min):
            assert torch.isnan(reduce(x, 0, 2)).item()
            assert torch.isnan(reduce(x, 0, 1)).tolist() == [False, True, False]
            assert torch.isnan(reduce(x, 1, 2)).sum().item() == 1
    assert ops.sum(torch.ones(0, 3), 0, 1).tolist() == [0, 0, 0]
    assert torch.isnan(ops.mean(torch.ones(3, 0), 1, 2)).all()


def test_long_sum_of_half_precision_neither_overflows_nor_drifts(ops: Any) -> None:
    x = torch.full((1 << 20,), 60_000.0, dtype=torch.float16)
    assert ops.mean(x, 0, 1).item() == 60_000.0
    ones = torch.full((3_000_001,), 0.1)
    assert ops.sum(ones, 0, 1).item() == pytest.approx(ones.double().sum().item(), rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_remainder_of_a_row_is_summed_and_nothing_else(ops: Any, dtype: torch.dtype) -> None:
    """Also the last row, behind which memory holds something else; on any number of threads the same bits."""
    for n in range(33, 33 + 34):
        held = torch.full((5 * n + 16,), NAN, dtype=dtype)
        x = held[8 : 8 + 5 * n].view(5, n).copy_(torch.randn(5, n))
        got = ops.sum(x, 1, 2, False)
        close(got / 8, x.double().sum(1) / 8, dtype)
        assert torch.equal(got, torch.stack([ops.sum(row, 0, 1, False) for row in x]))
        assert torch.equal(ops.max(x, 1, 2, False), x.amax(1))
        assert torch.equal(ops.min(x, 1, 2, False), x.amin(1))
    for n in range(1, 18):
        held = torch.full((n + 16,), NAN, dtype=dtype)
        x = held[8 : 8 + n].copy_(torch.randn(n))
        assert torch.equal(ops.relu(x), torch.relu(x))


@pytest.mark.skipif(sys.platform != "linux", reason="pages are protected by Linux's constants")
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_load_leaves_its_row(ops: Any, dtype: torch.dtype) -> None:
    """Rows that end where a page does, or begin there; the pages before and behind fault."""
    libc, page = ctypes.CDLL(None, use_errno=True), mmap.PAGESIZE
    libc.mmap.restype = ctypes.c_void_p
    size = ctypes.c_size_t
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    first = libc.mmap(None, size(3 * page), 3, private, -1, ctypes.c_long(0))
    for other in (first, first + 2 * page):
        assert libc.mprotect(ctypes.c_void_p(other), size(page), 0) == 0
    for n in (*range(1, 18), 33, 39, 65, 100):
        for at in (first + page, first + 2 * page - n * dtype.itemsize):
            memory = (ctypes.c_char * (n * dtype.itemsize)).from_address(at)
            x = torch.frombuffer(memory, dtype=dtype).copy_(torch.randn(n))
            assert torch.equal(ops.relu(x), torch.relu(x))
            close(ops.sum(x, 0, 1, False) / n, x.double().sum() / n, dtype)
            close(ops.softmax(x[None], None, 1.0, False, dtype), x[None].double().softmax(1), dtype)
            loss, _ = ops.softmax_cross_entropy(x[None], torch.tensor([n - 1]), -100, 0.1, 0)
            assert loss.isfinite().all()
    assert libc.munmap(ctypes.c_void_p(first), size(3 * page)) == 0


def test_reduction_does_not_depend_on_threads(ops: Any) -> None:
    x, before = torch.randn(7, 333_333), torch.get_num_threads()
    many = [ops.sum(x, 0, 2), ops.sum(x, 1, 2), ops.sum(x, 0, 1)]
    torch.set_num_threads(1)
    one = [ops.sum(x, 0, 2), ops.sum(x, 1, 2), ops.sum(x, 0, 1)]
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(many, one, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_rows_are_reduced_side_by_side(ops: Any, dtype: torch.dtype) -> None:
    """Every length of a short row and some beyond, with rows that fill lanes in part; NaN stays in its own row."""
    for n in (*range(1, 18), 31, 32, 33, 47):
        for rows in (1, 15, 16, 37, 5000 if n == 7 else 64):
            x = torch.randn(rows, n).to(dtype)
            x[rows // 2, n // 2] = NAN
            for name, exact in (("max", torch.amax), ("min", torch.amin), ("sum", torch.sum)):
                got = getattr(ops, name)(x, 1, 2)
                wanted = exact(x.double(), 1)
                assert torch.equal(torch.isnan(got), torch.isnan(wanted)), (name, rows, n)
                close(got[~got.isnan()] / n, wanted[~wanted.isnan()] / n, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_batch_norm_and_relu_of_a_product(ops: Any, dtype: torch.dtype) -> None:
    for rows, cols in ((1, 1), (3, 5), (33, 17), (200, 130)):
        acc, eps = torch.randn(rows, cols), 1e-3
        bias, mean, gamma, beta = (torch.randn(cols).to(dtype) for _ in range(4))
        var = (torch.rand(cols) + 0.5).to(dtype)
        for b, g, t in ((bias, gamma, beta), (None, None, None)):
            z = acc.double() + (0 if b is None else b.double())
            wide = [None if v is None else v.double() for v in (g, t)]
            wanted = torch.relu(F.batch_norm(z, mean.double(), var.double(), *wide, eps=eps))
            got = ops.batch_norm_relu(acc, b, mean, var, g, t, eps, dtype)
            assert got.dtype == dtype
            close(got, wanted, dtype)
    acc[0, 0] = NAN
    assert torch.isnan(ops.batch_norm_relu(acc, None, mean, var, None, None, eps, dtype)[0, 0])
    with pytest.raises(RuntimeError, match="mean must have 130 elements"):
        ops.batch_norm_relu(acc, None, mean[:1], var, None, None, eps, dtype)
    with pytest.raises(RuntimeError, match="mean and var are required"):
        ops.batch_norm_relu(acc, None, None, var, None, None, eps, dtype)
