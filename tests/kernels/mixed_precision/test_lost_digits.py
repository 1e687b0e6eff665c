"""Where careless kernels lose digits: small tails of activations, products that round to zero, long float32 sums."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ...support.triton import (
    DEVICE,
    TOLERANCE,
    TORCH,
    rand,
)
from ...support.triton import default_device as default_device  # a fixture

from tensorlogic.core.op import OPS  # isort: skip  (after the interpreter is asked for)
from tensorlogic.measure import verification

from tensorlogic.dispatch import candidate_loading  # isort: skip
from tensorlogic.core import activations as core_activations
from tensorlogic.kernels.gemm import spec as gemm_spec

from tensorlogic.kernels.gemm import bind  # isort: skip
from tensorlogic.kernels.elementwise import elementwise as elementwise_elementwise  # isort: skip

FLAT = {"strategy": "flat", "BLOCK": 64, "stream": False, "num_warps": 4}


def applied(op: str, dtype: str, *args: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of an element-wise kernel."""
    inputs, outputs = elementwise_elementwise.ELEMENTWISE[op]
    made = [torch.full_like(args[0], float("nan")) for _ in range(outputs)]
    names = [dtype] * (inputs + outputs)
    run = elementwise_elementwise.elementwise_launcher(
        op, names, 1, args[0].numel(), ["full"] * inputs, FLAT, DEVICE
    )
    assert run(*args, *made)
    return made


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh"])
def test_bfloat16_tails_keep_their_digits(kind: str) -> None:
    x = -torch.linspace(4, 11 if kind == "gelu" else 8, 64).bfloat16()
    (y,) = applied(kind, "bf16", x)
    want = core_activations.activate(x.double(), kind)
    assert (want != 0).all()
    assert ((y.double() - want).abs() <= 2**-7 * want.abs()).all()  # the interpreter cuts off


def test_float32_slopes_of_tanh_gelu_keep_their_digits() -> None:
    x = -torch.linspace(2, 6, 64)
    (dx,) = applied("gelu_tanh_bwd", "f32", torch.ones(64), x)
    leaf = x.double().requires_grad_()
    u = leaf * torch.sigmoid((8 / torch.pi) ** 0.5 * (leaf + 0.044715 * leaf**3))
    (want,) = torch.autograd.grad(u.sum(), leaf)
    assert ((dx.double() - want).abs() <= 1e-4 * want.abs()).all()


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_quotients_of_halves_over_their_whole_range(dtype: str) -> None:
    """Divided in float32 to 2 ulp: large divisors, subnormal numbers, infinities and zeros included."""
    kind = TORCH[dtype]
    every = torch.arange(-(1 << 15), 1 << 15, 37, device="cpu").to(torch.int16).view(kind)
    if DEVICE.type == "cpu":  # the interpreter misreads subnormal bfloat16
        every = every[(every == 0) | ~(every.abs() < torch.finfo(kind).tiny)]
    a = every.repeat(9)[: 8 * len(every)].to(DEVICE)
    b = every.flip(0).repeat_interleave(8).roll(5).to(DEVICE)
    (y,) = applied("div", dtype, a, b)
    want = (a.float() / b.float()).to(kind)
    least = torch.finfo(kind).tiny
    assert torch.equal(y.isnan(), want.isnan())
    assert torch.equal(y.isinf(), want.isinf())
    kept = want.isfinite() & (want.abs() >= least)
    got, wide = y[kept].double(), want[kept].double()
    assert ((got - wide).abs() <= TOLERANCE[dtype] * wide.abs()).all()
    small = want.isfinite() & ~kept
    assert (y[small].double() - want[small].double()).abs().max() <= least


def test_gradient_of_a_product_that_rounds_to_zero_is_zero() -> None:
    a, b = torch.full((8,), 2.0**-13).half(), torch.full((8,), 2.0**-12).half()
    a[1::2] *= 2  # 2**-24, the smallest float16
    da, _ = applied("mul_relu_bwd", "f16", torch.ones(8).half(), a, b)
    assert torch.equal(da, torch.where(a * b > 0, b, 0))


def test_a_product_made_again_from_its_operands_may_serve_backward() -> None:
    candidate_loading.ready(DEVICE.type)
    op = OPS["pointwise_backward"]
    args = [rand(9, dtype="f16", seed=i) for i in range(3)]
    y = torch.relu(args[1] * args[2])
    key = op.key([*args, None, y, "mul_relu", "110"], "backward")
    candidate = op.candidates["triton.flat"]
    launch = candidate.bind(key, candidate.configs(key)[0], DEVICE)
    found = verification.Checker(op, key, DEVICE).check(launch)
    assert found, found.reason


def test_long_float32_sums_are_summed_by_tiles() -> None:
    """A chain of additions would be off by 3e-6 here."""
    m, n, k = 16, 16, 1 << 14
    x, w = rand(m, k).abs(), rand(k, n, seed=1).abs()
    y = torch.empty(m, n)
    spec = gemm_spec.GemmSpec(
        m,
        n,
        k,
        gemm_spec.Operand("f32", k, 1),
        gemm_spec.Operand("f32", n, 1),
        gemm_spec.Operand("f32", n, 1),
    )
    config = {"BLOCK_M": 16, "BLOCK_N": 16, "BLOCK_K": 128, "GROUP_M": 8, "SPLIT": 1, "num_warps": 4, "num_stages": 2}  # fmt: skip
    assert bind.gemm_launcher(spec, config, DEVICE)(x, w, y)
    want = x.double() @ w.double()
    assert (y.double() - want).norm() <= 6e-7 * want.norm()


def test_float64_gelu_is_a_reference_far_below_zero() -> None:
    x = torch.tensor([-9.0, -1.0, 0.0, 3.0, float("inf")], dtype=torch.float64)
    for kind in ("gelu", "gelu_tanh"):
        y = core_activations.activate(x, kind)
        near = F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
        assert torch.allclose(y, near, rtol=1e-12, atol=1e-15)
        assert -1e-17 < y[0] < 0
