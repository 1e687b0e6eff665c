"""layer_norm_linear keeps its normalised rows for backward on a CUDA device, where making them again is a pass of its own."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

from torch._subclasses.fake_tensor import FakeTensorMode

import tensorlogic
from tensorlogic.core.key import Key
from tensorlogic.dispatch import candidate_loading
from tensorlogic.kernels.gemm import bind
from tensorlogic.native import cpu_library
from tensorlogic.ops.layer_norm_linear import (
    LAYER_NORM_LINEAR,
    LAYER_NORM_LINEAR_BACKWARD,
    _kept,
    again,
    cublaslt,
    layer_norm_linear_backward,
    triton,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
candidate_loading.ready(DEVICE.type)
M, K, N, EPS = 33, 48, 40, 1e-5
NEEDS = ("11111", "10000", "00010", "01000", "00011", "11100")


def _operands(dtype: torch.dtype = torch.float32, affine: bool = True) -> list[Tensor | None]:
    torch.manual_seed(3)
    x, weight = torch.randn(M, K) + 0.5, torch.randn(N, K) * K**-0.5
    gamma, beta = (torch.randn(K) + 1, torch.randn(K)) if affine else (None, None)
    given = (x, gamma, beta, weight, torch.randn(N))
    return [None if t is None else t.to(DEVICE, dtype) for t in given]


def _key(args: list[Tensor | None], save: bool = True) -> Key:
    """A key as on a CUDA device."""
    return replace(LAYER_NORM_LINEAR.key((*args, EPS, save), "forward"), device="cuda")


def _made(x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> list[Tensor]:
    wide = [None if t is None else t.double() for t in (x, gamma, beta)]
    normal, mean, rstd = torch.native_layer_norm(wide[0], (K,), wide[1], wide[2], EPS)
    return [normal.to(x.dtype), mean.flatten().float(), rstd.flatten().float()]


def _close(got: Tensor | None, want: Tensor, tolerance: float) -> None:
    assert got is not None
    assert got.shape == want.shape
    error = (got.double() - want.double()).norm() / want.double().norm()
    assert error < tolerance, error


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_norm_before_a_product_gives_what_it_made(dtype: torch.dtype, affine: bool) -> None:
    args = _operands(dtype, affine)
    plan = cublaslt.after(_key(args), "triton")
    assert isinstance(plan, bind.Plan)
    config = bind.configurations(plan)[0]
    launch = bind.launcher(LAYER_NORM_LINEAR, plan, config, DEVICE)
    x, gamma, beta, weight, bias = args
    assert x is not None
    assert weight is not None
    assert bias is not None
    normal, mean, rstd = _made(x, gamma, beta)
    y = normal.double() @ weight.double().t() + bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 3e-3
    outs = launch(*args)
    assert outs is not None
    bounds = (tolerance, tolerance, 1e-5, 1e-5)
    for got, want, bound in zip(outs, (y, normal, mean, rstd), bounds, strict=True):
        _close(got, want, bound)


def test_only_cuda_keeps_them_and_only_for_backward() -> None:
    args = _operands()
    own = LAYER_NORM_LINEAR.key((*args, EPS, True), "forward")
    for key in (_key(args, save=False), replace(own, device="cpu"), replace(own, device="mps")):
        plan = cublaslt.after(key, "cublaslt")
        assert isinstance(plan, bind.Plan)
        assert plan.returns == ("y",)
    assert "kept for backward" in str(triton.tiled(_key(args), "triton"))
    assert not isinstance(triton.tiled(_key(args, save=False), "triton"), str)


def test_the_plain_composition_declares_them_on_cuda() -> None:
    """What compiled graphs are built on: fake tensors of that device."""
    with FakeTensorMode():
        x, w = (torch.empty(s, device="cuda").half() for s in ((2, 3, K), (N, K)))
        outs = LAYER_NORM_LINEAR.reference(x, None, None, w, None, EPS, True)
        assert [tuple(o.shape) for o in outs] == [(2, 3, N), (2, 3, K), (6,), (6,)]
        assert [o.dtype for o in outs] == [torch.float16] * 2 + [torch.float32] * 2
        assert len(LAYER_NORM_LINEAR.reference(x, None, None, w, None, EPS, False)) == 1


@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("way", ["torch.eager", "triton.products", "cpu.products"])
def test_backward_reads_what_was_kept(way: str, needs: str) -> None:
    """And nothing of what was not."""
    args = _operands()
    x, gamma, beta, weight, bias = args
    assert x is not None
    leaves = [None if t is None else t.double().requires_grad_() for t in args]
    y = F.linear(F.layer_norm(leaves[0], (K,), leaves[1], leaves[2], EPS), leaves[3], leaves[4])
    dy = torch.randn(M, N, device=DEVICE)
    grads = torch.autograd.grad(y, [t for t in leaves if t is not None], dy.double())
    outs = (y, *_made(x, gamma, beta))
    wanted = tuple(n == "1" for n in needs)
    saved = _kept(None, wanted, (x, gamma, beta, weight, bias), outs)  # type: ignore[arg-type]
    kept = [t if isinstance(t, Tensor) or t is None else t.beside(dy) for t in saved]
    assert not again(kept[4], kept[5], needs)
    for poisoned in [t for t, k in zip(kept, saved, strict=True) if t is not k]:
        poisoned.fill_(float("nan"))  # type: ignore[union-attr]
    given = (dy, *kept, EPS, needs)
    candidate = LAYER_NORM_LINEAR_BACKWARD.candidates.get(way)
    key = LAYER_NORM_LINEAR_BACKWARD.key(given, "backward")
    if candidate is None or candidate.unfit(key):
        assert way == "cpu.products"
        assert cpu_library.available() or DEVICE.type != "cpu"
        pytest.skip("not on this machine")
    launch = candidate.bind(key, candidate.configs(key)[0], DEVICE)
    got = launch(dy, *kept)
    assert got is not None
    for g, want, need in zip(got, grads, wanted, strict=True):
        assert (g is not None) == need
        if g is not None:
            _close(g, want, 1e-5)


def test_what_was_kept_in_part_is_made_again() -> None:
    args = _operands(torch.float16)
    x, gamma, beta, weight, _ = args
    assert x is not None
    dy = torch.randn(M, N, device=DEVICE).half()
    normal, mean, rstd = _made(x, gamma, beta)
    whole = layer_norm_linear_backward(dy, x, gamma, beta, weight, normal, mean, rstd, EPS, "11111")
    for kept in ((None, mean, rstd), (normal, None, None), (None, None, None)):
        part = layer_norm_linear_backward(dy, x, gamma, beta, weight, *kept, EPS, "11111")
        for a, b in zip(part, whole, strict=True):
            _close(a, b, 3e-3)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="no GPU")
def test_it_is_kept_in_calls_on_a_gpu() -> None:
    leaves = [None if t is None else t.requires_grad_() for t in _operands(torch.float16)]
    held: list[Tensor] = []

    def note(t: Tensor) -> Tensor:
        held.append(t)
        return t

    for _ in range(3):
        held.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            tensorlogic.layer_norm_linear(*leaves)
        assert sum(t.shape == (M, K) for t in held) == 2, [t.shape for t in held]  # x and its norm
