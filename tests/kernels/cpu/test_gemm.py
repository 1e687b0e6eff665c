"""The native products against float64: every layout, batch, element type and instruction set, few rows and many."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import tensorlogic
from tensorlogic.core import dtypes
from tensorlogic.core.op import OPS
from tensorlogic.dispatch import candidate_loading
from tensorlogic.kernels.cpu import cost_model
from tensorlogic.kernels.cpu import gemm as cpu_gemm
from tensorlogic.measure.verification import Checker
from tensorlogic.native import cpu_library

from ...support.native import (
    DTYPES,
    EXACT,
    INF,
    LAYOUTS,
    LEVELS,
    NAN,
    assert_near,
    assert_product,
    assert_ulps,
    expected,
    ulps_of,
)
from ...support.native import ops as ops  # a fixture

pytestmark = pytest.mark.skipif(
    cpu_library.available() is not None, reason=str(cpu_library.available())
)

SHAPES = ((1, 1, 1), (3, 5, 7), (13, 31, 16), (14, 32, 385), (33, 47, 129), (65, 129, 400), (1, 300, 500), (5, 70, 33), (200, 1, 70), (150, 520, 40), (12, 1100, 9), (16, 900, 19), (300, 1, 70), (90, 11, 70), (5, 3, 130), (8, 130, 77), (11, 70, 77), (9, 40, 127), (16, 70, 64), (7, 9, 0))  # fmt: skip
BATCHES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), ()),
    ((3,), ()),
    ((3,), (3,)),
    ((2, 1), (4,)),
    ((), (2,)),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_layout_and_batch(ops: Any, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    for left, right in BATCHES:
        a, b = torch.randn(*left, m, k).to(dtype), torch.randn(*right, k, n).to(dtype)
        found = [
            ops.matmul(lay_a(a), lay_b(b)) for lay_a, lay_b in itertools.product(LAYOUTS, LAYOUTS)
        ]
        if not right:
            found.append(ops.linear(a, b.mT.contiguous()))
        known = expected(dtype, a, b)
        for y in found:
            assert y.dtype == dtype
            assert_near(y, *known)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 6, 9])
@pytest.mark.parametrize("inner", [700, 7001])
def test_weights_beyond_the_caches(ops: Any, inner: int, rows: int, dtype: torch.dtype) -> None:
    """Large weights are asked for ahead where that is faster at the moment, which changes no bit, nor does the number of threads."""
    columns = (1 << 20) // inner + 8
    x, w = torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype)
    padded = torch.cat((w, w.new_full((columns, 3), NAN)), 1)[:, :inner]
    across = w.reshape(inner, columns)
    y, z = ops.linear(x, w), ops.matmul(x, across)
    assert_product(y, x, w.t())
    assert_product(z, x, across)
    for _ in range(5):
        assert torch.equal(ops.linear(x, w), y)
        assert torch.equal(ops.matmul(x, across), z)
    assert torch.equal(ops.linear(x, padded), y)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = ops.linear(x, w), ops.matmul(x, across)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone[0], y)
    assert torch.equal(alone[1], z)


def test_vectors_are_as_in_torch(ops: Any) -> None:
    a, b, v, w = torch.randn(9, 33), torch.randn(33, 21), torch.randn(33), torch.randn(21, 33)
    for left, right in ((v, b), (a, v), (v, v), (a.expand(4, 9, 33), v), (v, b.expand(3, 33, 21))):
        torch.testing.assert_close(ops.matmul(left, right), left @ right)
    torch.testing.assert_close(ops.linear(v, w), w @ v)


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_left_operand_may_be_wider(ops: Any, rows: int) -> None:
    x, w = torch.randn(rows, 77), torch.randn(50, 77).half()
    y = ops.linear(x, w)
    assert y.dtype == torch.float16
    assert_product(y, x, w.t())
    wide = ops.matmul_f32(w, w, True)
    assert wide.dtype == torch.float32
    assert_product(wide, w, w.t())


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue_follows_in_the_same_call(ops: Any, dtype: torch.dtype, activation: str) -> None:
    apply = {"none": lambda z: z, "relu": torch.relu, **EXACT}[activation]
    code = cpu_library.ACTIVATIONS[activation]
    for rows, columns, depth in ((1, 45, 24), (3, 45, 24), (50, 45, 24), (50, 1, 24), (50, 7, 70)):
        x, w = torch.randn(rows, depth).to(dtype), torch.randn(columns, depth).to(dtype)
        bias, residual = torch.randn(columns).to(dtype), torch.randn(rows, columns).to(dtype)
        for b, r in ((bias, residual), (bias, None), (None, residual), (None, None)):
            y, pre = ops.linear_pre(x, w, b, r, code)
            z = ops.matmul_f32(x, w, True)
            z = z if b is None else z + b.float()
            z = z if r is None else z + r.float()
            torch.testing.assert_close(pre, z.to(dtype), rtol=0, atol=0)
            assert_ulps(y, apply(z.double()), ulps_of(ops))
            torch.testing.assert_close(ops.linear(x, w, b, r, code), y, rtol=0, atol=0)
        y, pre = ops.matmul_pre(x, w.t(), code)
        torch.testing.assert_close(ops.matmul(x, w.t(), code), y, rtol=0, atol=0)
        torch.testing.assert_close(ops.matmul(x, w.t()), pre, rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 40])
def test_sums_leave_half_precision_range_and_return(ops: Any, rows: int) -> None:
    x = torch.full((rows, 512), 60000.0).half()
    w = torch.ones(40, 512).half()
    w[:, 256:] = -1
    w[:, 0] = 0
    for y in (ops.linear(x, w), ops.matmul(x, w.t().contiguous())):
        torch.testing.assert_close(y, torch.full_like(y, -60000.0), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [2, 40])
def test_nan_infinity_and_denormals(ops: Any, rows: int, dtype: torch.dtype) -> None:
    x, w = torch.ones(rows, 50).to(dtype), torch.ones(60, 50).to(dtype)
    x[0, 0], w[1, 3], w[2, 4], w[3, 5] = INF, NAN, -INF, 0
    x[1, 5] = NAN
    wanted = x.float() @ w.float().t()
    for y in (ops.linear(x, w), ops.matmul(x, w.t().contiguous())):
        torch.testing.assert_close(y, wanted.to(dtype), rtol=0, atol=0, equal_nan=True)
    if dtype == torch.float16:
        tiny = torch.full((rows, 16), 6e-8).half()
        torch.testing.assert_close(ops.linear(tiny, torch.ones(40, 16).half()), tiny.new_full((rows, 40), 16 * tiny[0, 0].item()), rtol=0, atol=0)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_instruction_sets_agree(dtype: torch.dtype) -> None:
    have = [v for v in LEVELS if v in cpu_library.op("features")().split(",")]
    a, b = torch.randn(70, 300).to(dtype), torch.randn(300, 90).to(dtype)
    found = []
    for level in have:
        cpu_library.op("set_isa")(level)
        found.append(cpu_library.op("matmul")(a, b).double())
    cpu_library.op("set_isa")("auto")
    for y in found[1:]:
        assert bool(((y - found[0]).abs() <= 2 * expected(dtype, a, b)[1]).all())


@pytest.mark.parametrize("rows", [1, 4, 15, 33, 600])
def test_threads_change_no_bit(ops: Any, rows: int) -> None:
    x, w = torch.randn(rows, 200), torch.randn(600, 200)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append((ops.linear(x, w), ops.matmul(x, w.t().contiguous())))
    torch.set_num_threads(before)
    for y, z in found[1:]:
        assert torch.equal(y, found[0][0])
        assert torch.equal(z, found[0][1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner"), [(1200, 120), (400, 1000)])
def test_threads_that_are_done_help_the_others(
    ops: Any, dtype: torch.dtype, rows: int, inner: int
) -> None:
    """More threads than processors: some are late, and find their rows taken. A left operand by rows and, where there are many, by
    columns, sums that are the output, that pass through an epilogue, and that do so tile by tile."""
    a, b, w = (torch.randn(*s).to(dtype) for s in ((rows, inner), (inner, 384), (384, inner)))
    bias, residual = torch.randn(384).to(dtype), torch.randn(rows, 384).to(dtype)
    before = torch.get_num_threads()

    def products() -> list[Tensor]:
        turned = a.mT.contiguous().mT
        return [
            ops.matmul_f32(a, b, False, 3),
            ops.matmul_f32(turned, b, False, 3),
            ops.linear(a, w, bias, residual, cpu_library.ACTIVATIONS["gelu"]),
            ops.linear(turned, w, bias, None, cpu_library.ACTIVATIONS["none"]),
        ]

    try:
        torch.set_num_threads(1)
        wanted = products()
        assert_product(wanted[0], a, b)
        for threads in (2, 3, 7) * 3:
            torch.set_num_threads(threads)
            for y, want in zip(products(), wanted, strict=True):
                assert torch.equal(y, want)
    finally:
        torch.set_num_threads(before)


def test_blocks_as_wide_as_the_caches_allow_change_no_bit(ops: Any) -> None:
    """One thread may count on more of the third-level cache than seven: blocks are wider then, and where no cache holds their sums
    these lie in the output, which the epilogue then goes over."""
    a, b, w = torch.randn(1056, 420), torch.randn(420, 2080), torch.randn(2080, 420)
    bias, residual = torch.randn(2080), torch.randn(1056, 2080)
    before, found = torch.get_num_threads(), []
    gelu, silu = cpu_library.ACTIVATIONS["gelu"], cpu_library.ACTIVATIONS["silu"]
    try:
        for threads in (1, 2, 7):
            torch.set_num_threads(threads)
            y, z = ops.matmul_f32(a, b, False, 3), ops.linear(a, w, bias, residual, gelu)
            found.append((y, z, *ops.linear_pre(a, w, bias, None, silu)))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        for y, other in zip(found[0], others, strict=True):
            assert torch.equal(y, other)
    y, z, after, pre = found[0]
    assert_product(y, a, b)
    assert_product(pre - bias, a, w.t())
    torch.testing.assert_close(after, torch.nn.functional.silu(pre))
    torch.testing.assert_close(z, torch.nn.functional.gelu(pre + residual), rtol=1e-4, atol=1e-4)


def test_overlapping_and_empty_operands(ops: Any) -> None:
    line = torch.randn(200)
    windows = line.as_strided((40, 60), (3, 1))  # rows share memory
    assert_product(ops.matmul(windows, windows.t()), windows, windows.t())
    spread = torch.randn(1, 60).expand(40, 60)
    assert_product(ops.matmul(spread, spread.t()), spread, spread.t())
    for a, b in ((torch.ones(0, 4), torch.ones(4, 3)), (torch.ones(2, 4), torch.ones(4, 0))):
        assert ops.matmul(a, b).shape == (a.shape[0], b.shape[1])
    assert torch.equal(ops.matmul(torch.ones(2, 0), torch.ones(0, 3)), torch.zeros(2, 3))
    assert torch.equal(
        ops.linear(torch.ones(2, 0), torch.ones(3, 0), torch.ones(3)), torch.ones(2, 3)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda n: n.linear(torch.ones(2), torch.ones(4, 3)), "does not fit"),
        (lambda n: n.matmul(torch.ones(2, 2, 3), torch.ones(3, 3, 4)), "do not broadcast"),
        (lambda n: n.matmul(torch.ones(()), torch.ones(3)), "dimensions"),
        (lambda n: n.matmul(torch.ones(2, 3), torch.ones(3, 4).double()), "float16, bfloat16"),
        (lambda n: n.matmul(torch.ones(2, 3), torch.ones(3, 4), 9), "activation"),
        (lambda n: n.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(3)), "bias"),
        (lambda n: n.linear(torch.ones(2, 3), torch.ones(4, 3), None, torch.ones(4)), "residual"),
    ],
)
def test_bad_products_are_named(call: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        call(torch.ops.tensorlogic_native)


def test_strided_vectors_of_layer_norm_are_served_whoever_would_be_chosen() -> None:
    candidate_loading.ready("cpu")
    key = OPS["layer_norm_linear"].key
    x, w, b = torch.randn(64, 8), torch.randn(16, 8), torch.randn(16)
    for gamma in (torch.randn(8), torch.randn(16)[::2], None):
        found = (
            OPS["layer_norm_linear"]
            .candidates["cpu.fused"]
            .unfit(key([x, gamma, gamma, w, b, 1e-5, False], "inference"))
        )
        assert (found is None) == (gamma is None or gamma.is_contiguous())
        with tensorlogic.policy(tune="off", force="cpu.fused"):
            y = tensorlogic.layer_norm_linear(x, gamma, gamma, w, b)
        want = torch.nn.functional.layer_norm(x, (8,), gamma, gamma)
        torch.testing.assert_close(y, torch.nn.functional.linear(want, w, b))


@pytest.mark.skipif(cpu_library.available("cpu") is not None, reason="no native library")
@pytest.mark.parametrize("name", ["dropout_linear", "gelu_linear", "layer_norm_linear"])
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize("sooner", [True, False])
def test_pytorchs_product_of_halves_behind_a_pass_of_ours(
    name: str, dtype: str, sooner: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offered where PyTorch multiplies halves as such, first where that is expected to be faster, and right in the op's own dtype."""
    candidate_loading.ready("cpu")
    monkeypatch.setattr(cost_model, "half_is_slow", lambda dtype: dtype == "f16")
    monkeypatch.setattr(cost_model, "torch_us", lambda *_: 10.0)
    monkeypatch.setattr(cost_model, "native_us", lambda *_, wide=False: 20.0 if sooner else 5.0)
    x, w, b = (torch.randn(s).to(dtypes.DTYPES[dtype]) for s in ((33, 64), (48, 64), (48,)))
    more = {
        "dropout_linear": (w, b, 0.25, 7, 8, None),
        "gelu_linear": (w, b, "none"),
        "layer_norm_linear": (x[0].clone(), x[1].clone(), w, b, 1e-5),
    }[name]
    op = OPS[name]
    key = op.key((x, *more, False), "inference")
    candidate = op.candidates["cpu.fused"]
    plain = [c["product"] == "plain" for c in candidate.configs(key)]
    assert any(plain) == (dtype == "bf16")
    if any(plain):
        assert plain.index(True) == (0 if sooner else len(plain) - 1)
    checker = Checker(op, key, torch.device("cpu"))
    for config in candidate.configs(key):
        verdict = checker.check(candidate.bind(key, config, torch.device("cpu")))
        assert verdict, (config, verdict.reason)
    theirs, own = cost_model.before_us(str(cpu_gemm._before(key)), 33, 64, dtype)
    product = 5.0 if not sooner else 10.0 if dtype == "bf16" else 20.0
    assert candidate.guess(key) == pytest.approx((product + own) / (10.0 + theirs))


@pytest.mark.parametrize("shape", [(3, 5, 7), (33, 70, 65), (100, 96, 530)])
def test_float64_is_narrowed_while_it_is_packed(ops: Any, shape: tuple[int, int, int]) -> None:
    """Bit for bit as if it had been narrowed before, whatever its layout, partner, range and the parts that are asked for."""
    m, n, k = shape
    a, b = torch.randn(m, k, dtype=torch.float64), torch.randn(k, n, dtype=torch.float64)
    hard = a.clone()
    hard[1, 2], hard[2, 1] = 1e300, 1e-42  # beyond float32, and a denormal there
    for parts in (1, 2, 3):
        for x, y in (
            (a, b),
            (a.t().contiguous().t(), b),
            (a, b.t().contiguous().t()),
            (torch.randn(m, 2 * k, dtype=torch.float64)[:, ::2], b),
            (hard, b),
            (a, b.float()),
            (a.float(), b),
            (a, b.half()),
        ):
            other = y.dtype == torch.float16 or m < 13  # summed by another kernel
            want = ops.matmul_f32(x.float(), y.float(), False, 3 if other else parts)
            got = ops.matmul_f32(x, y, False, parts)
            near = (2e-2 if parts == 1 else 1e-3) if other else 0.0  # one part is a bfloat16
            torch.testing.assert_close(got, want, rtol=near, atol=10 * near, equal_nan=True)
