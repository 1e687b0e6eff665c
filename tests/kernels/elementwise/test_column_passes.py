"""Passes with column sums, polled reductions and paired gradients against float64: on a GPU, else in the interpreter."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

from tensorlogic.kernels.elementwise import column_passes as elementwise_column_passes
from tensorlogic.kernels.elementwise import dropout
from tensorlogic.kernels.elementwise import elementwise as elementwise_elementwise
from tensorlogic.kernels.reduce import contiguous as reduce_contiguous
from tensorlogic.ops.common.dropout_rng import keep_mask

from ...support.triton import DEVICE
from ...support.triton import TOLERANCE_OF_LARGEST as TOLERANCE
from ...support.triton import close_to_largest as close
from ...support.triton import nan_filled as poisoned
from ...support.triton import randn as rand

SHAPES = [(1, 5), (7, 16), (33, 37), (50, 129)]
CONFIGS = [{"BLOCK_R": 8, "BLOCK_C": 32, "parts": parts, "num_warps": 4} for parts in (1, 3)]
EPS = 1e-3


def workspace(size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    space = torch.full((size[0],), float("nan"), device=DEVICE)
    return space, torch.zeros(size[1], device=DEVICE, dtype=torch.int32)


@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("config", CONFIGS, ids=["alone", "shared"])
def test_activation_gradient_with_column_sums(
    kind: str, dtype: str, config: dict[str, Any]
) -> None:
    for m, n in SHAPES:
        dy, kept = rand(m, n, dtype=dtype), rand(m, n, dtype=dtype)
        leaf = kept.double().requires_grad_()
        act = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}.get(
            kind, lambda v: F.gelu(v, approximate="tanh")
        )
        (want,) = torch.autograd.grad(act(leaf), leaf, dy.double())
        space, counter = workspace(elementwise_column_passes.backward_space(n, 1, config))
        run = elementwise_column_passes.activation_backward_launcher(
            f"{kind}_bwd", m, n, dtype, config, DEVICE, 4
        )
        for _ in range(2):  # the second run finds the counters as the first one left them
            dz, db = poisoned(m, n, dtype=dtype), poisoned(n, dtype=dtype)
            assert run(dy, kept, dz, db, space, counter)
            close(dz, want, dtype)
            close(db, want.sum(0), dtype)
            assert not counter.any()


@pytest.mark.parametrize("has_gamma", [True, False])
@pytest.mark.parametrize("config", CONFIGS, ids=["alone", "shared"])
def test_batch_norm_relu_backward(has_gamma: bool, config: dict[str, Any]) -> None:
    for m, n in SHAPES:
        dy, z, mean = rand(m, n), rand(m, n) + 3, rand(n, dtype="f32") + 3
        var, gamma = rand(n, dtype="f32").abs() + 0.2, rand(n) if has_gamma else None
        rstd = (var.double() + EPS).rsqrt()
        normal = (z.double() - mean.double()) * rstd
        scale = 1.0 if gamma is None else gamma.double()
        y = torch.relu(normal * scale).half()
        y[0, 0] = float("nan")  # must not hide the gradient from who looks for what is not finite
        g = torch.where(y <= 0, 0.0, dy.double())
        dtypes = {
            "dy": "f16", "y": "f16", "z": "f16", "mean": "f32", "var": "f32", "gamma": "f16" if has_gamma else None,
            "dz": "f16", "db": "f16", "dgamma": "f32", "dbeta": "f32",
        }  # fmt: skip
        space, counter = workspace(elementwise_column_passes.backward_space(n, 2, config))
        run = elementwise_column_passes.backward_launcher(m, n, dtypes, config, DEVICE, 4)
        vectors = (mean, var) if gamma is None else (mean, var, gamma)
        for _ in range(2):
            dz, db = poisoned(m, n), poisoned(n)
            dgamma, dbeta = poisoned(n, dtype="f32"), poisoned(n, dtype="f32")
            assert run(dy, y, z, *vectors, dz, db, dgamma, dbeta, space, counter, EPS)
            close(dz, g * rstd * scale, "f16")
            close(db, (g * rstd * scale).sum(0), "f16")
            close(dgamma, (g * normal).sum(0), "f32")
            close(dbeta, g.sum(0), "f32")
            assert not counter.any()


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("given", ["bias gamma beta", "gamma", "bias beta", ""])
def test_batch_norm_relu_forward(given: str, kept: bool) -> None:
    config = {"BLOCK_R": 4, "BLOCK_C": 32, "num_warps": 4}
    for m, n in SHAPES:
        z, mean, var = rand(m, n), rand(n), rand(n, dtype="f32").abs() + 0.2
        bias, gamma, beta = (rand(n) if name in given.split() else None for name in ("bias", "gamma", "beta"))  # fmt: skip
        before = z.clone()
        whole = z.double() + (0.0 if bias is None else bias.double())
        want = (whole - mean.double()) * (var.double() + EPS).rsqrt()
        want = want * (1.0 if gamma is None else gamma.double()) + (
            0.0 if beta is None else beta.double()
        )
        dtypes = {
            "z": "f16", "bias": None if bias is None else "f16", "mean": "f16", "var": "f32",
            "gamma": None if gamma is None else "f16", "beta": None if beta is None else "f16", "y": "f16",
            "kept": "f16" if kept else None,
        }  # fmt: skip
        y = poisoned(m, n)
        run = elementwise_column_passes.apply_launcher(m, n, dtypes, config, DEVICE, 4)
        given_ = (z, bias, mean, var, gamma, beta, y, z if kept else None)
        assert run(*(t for t in given_ if t is not None), EPS)
        close(y, torch.relu(want), "f16")
        if kept:
            close(z, whole, "f16")
        else:
            assert torch.equal(z, before)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_gelu_and_its_gradient_together(approximate: str, dtype: str) -> None:
    count = 203
    dy, x = rand(count, dtype=dtype), rand(count, dtype=dtype) * 3
    x[:4] = torch.tensor([300.0, -300.0, 6e4, 0.0])
    leaf = x.double().requires_grad_()
    y = F.gelu(leaf, approximate=approximate)
    (want,) = torch.autograd.grad(y, leaf, dy.double())
    name = "gelu_tanh_both" if approximate == "tanh" else "gelu_both"
    config = {"strategy": "flat", "BLOCK": 64, "stream": False, "num_warps": 4}
    run = elementwise_elementwise.elementwise_launcher(
        name, [dtype] * 4, 1, count, ["full"] * 2, config, DEVICE, 4
    )
    dx, active = poisoned(count, dtype=dtype), poisoned(count, dtype=dtype)
    assert run(dy, x, dx, active)
    torch.testing.assert_close(dx.double(), want, rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(
        active.double(), y.detach(), rtol=2 * TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


@pytest.mark.parametrize("kind", ["sum", "mean", "max", "min"])
@pytest.mark.parametrize("count", [1, 31, 32, 1000])
def test_polled_reduction_counts_its_launches(kind: str, count: int) -> None:
    """Launches of different widths follow one another on the same cells."""
    cells = torch.zeros(64, device=DEVICE, dtype=torch.int64)
    for launch, parts in enumerate((3, 1, 8, 3), 1):
        x = rand(count)
        config = {"strategy": "polled", "parts": parts, "last": True, "BLOCK": 32, "num_warps": 4}
        assert reduce_contiguous.reduce_workspace(1, count, 1, config) == (0, parts + 1)
        run = reduce_contiguous.reduce_launcher(kind, "f16", "f32", 1, count, 1, config, DEVICE, 2)
        y = poisoned(1, dtype="f32")
        assert run(x, y, y, cells)
        want = {
            "sum": x.double().sum(),
            "mean": x.double().mean(),
            "max": x.double().max(),
            "min": x.double().min(),
        }
        close(y, want[kind], "f32")
        assert cells[0] == launch


def test_polled_is_offered_only_where_one_wave_reads_everything() -> None:
    def offered(outer: int, count: int) -> bool:
        return any(
            c["strategy"] == "polled"
            for c in reduce_contiguous.reduce_configs(outer, count, 1, "f16")
        )

    assert offered(1, 1 << 20)
    assert not offered(2, 1 << 20)
    assert not offered(1, 1 << 27)
    assert not offered(1, 100)


@pytest.mark.parametrize("seeded", [True, False])
@pytest.mark.parametrize("count", [1, 2047, 3000])
def test_dropout_alone(count: int, seeded: bool) -> None:
    x, whole = rand(count), poisoned(count + 64)
    config = {"BLOCK": 1024, "num_warps": 4}
    run = dropout.dropout_launcher("f16", count, seeded, config, DEVICE, 2)
    state = torch.tensor([7, 11], device=DEVICE)
    assert run(x, whole[:count], 0.25, 7, 11) if seeded else run(x, state, whole[:count], 0.25)
    keep = keep_mask((count,), 0.25, 7, 11, DEVICE)
    close(whole[:count], torch.where(keep, x.double() / 0.75, 0.0), "f16")
    assert whole[count:].isnan().all()
