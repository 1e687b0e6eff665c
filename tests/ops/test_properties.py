"""Random shapes, strides, dtypes and flags: every op and candidate against float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import tensorlogic
from tensorlogic.core import tolerance
from tensorlogic.core.candidate import EAGER
from tensorlogic.core.op import OPS, Op
from tensorlogic.dispatch import dispatcher
from tensorlogic.system import hardware

from ..support.helpers import PUBLIC, reference, runnable

SIZES = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 17, 33])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.float64])
LAYOUTS = st.sampled_from(["contiguous", "transposed", "strided", "expanded", "offset", "flipped"])
ACTIVATIONS = st.sampled_from(["none", "relu", "gelu", "gelu_tanh", "silu"])
Draw = Callable[[st.SearchStrategy[Any]], Any]


def tensor(draw: Draw, shape: tuple[int, ...], dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Random values in one of the ways a tensor may lie in memory."""
    layout = draw(LAYOUTS)
    values = torch.randn(shape) * scale
    if layout == "transposed" and len(shape) > 1:
        return values.to(dtype).mT.contiguous().mT
    if layout == "strided" and shape:
        wide = torch.empty(*shape[:-1], 2 * shape[-1], dtype=dtype)
        wide[..., ::2] = values
        return wide[..., ::2]
    if layout == "expanded" and len(shape) > 1:
        return values[:1].to(dtype).expand(shape)
    if layout == "offset":
        flat = torch.empty(values.numel() + 1, dtype=dtype)
        flat[1:] = values.reshape(-1)
        return flat[1:].view(shape)
    if layout == "flipped" and shape:
        return values.to(dtype).flip(-1)
    return values.to(dtype)


def product(
    draw: Draw, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None, tuple[int, ...]]:
    k, n = draw(SIZES), draw(SIZES)
    lead = draw(st.sampled_from([(draw(SIZES),), (2, draw(SIZES)), (1, 3, 2), (0,), ()]))
    x, w = tensor(draw, (*lead, k), dtype), tensor(draw, (n, k), dtype, k**-0.5)
    return x, w, tensor(draw, (n,), dtype) if draw(st.booleans()) else None, (*lead, n)


def _linear(draw: Draw, dtype: torch.dtype) -> list[Any]:
    x, w, b, out = product(draw, dtype)
    residual = tensor(draw, out, dtype) if draw(st.booleans()) else None
    return [x, w, b, residual, draw(ACTIVATIONS)]


def _matmul(draw: Draw, dtype: torch.dtype) -> list[Any]:
    m, k, n = draw(SIZES), draw(SIZES), draw(SIZES)
    left, right = draw(st.sampled_from([((), ()), ((2,), (2,)), ((3,), ()), ((2, 1), (3,))]))
    a, b = tensor(draw, (*left, m, k), dtype), tensor(draw, (*right, k, n), dtype, k**-0.5)
    return [a, b, draw(ACTIVATIONS)]


def _gelu_linear(draw: Draw, dtype: torch.dtype) -> list[Any]:
    return [*product(draw, dtype)[:3], draw(st.sampled_from(["none", "tanh"]))]


def _layer_norm_linear(draw: Draw, dtype: torch.dtype) -> list[Any]:
    x, w, b, _ = product(draw, dtype)
    k = x.shape[-1]
    gamma = tensor(draw, (k,), dtype) if draw(st.booleans()) else None
    beta = tensor(draw, (k,), dtype) if draw(st.booleans()) else None
    return [x, gamma, beta, w, b, 1e-3]


def _linear_batch_norm_relu(draw: Draw, dtype: torch.dtype) -> list[Any]:
    x, w, b, out = product(draw, dtype)
    n, rows = out[-1], x.numel() // x.shape[-1]
    training = draw(st.booleans()) and rows > 3
    mean, var = torch.randn(n).to(dtype), torch.rand(n).to(dtype) + 0.5
    gamma = tensor(draw, (n,), dtype) if draw(st.booleans()) else None
    return [x, w, b, mean, var, gamma, tensor(draw, (n,), dtype), 1e-2, training, 0.1]


def _pointwise(count: int) -> Callable[[Draw, torch.dtype], list[Any]]:
    def make(draw: Draw, dtype: torch.dtype) -> list[Any]:
        shape = tuple(draw(st.lists(SIZES, max_size=3)))
        cut = [
            shape,
            *(
                draw(st.sampled_from([shape, shape[1:], (1,) * len(shape)]))
                for _ in range(count - 1)
            ),
        ]
        return [tensor(draw, s, dtype) for s in cut]

    return make


def _div(draw: Draw, dtype: torch.dtype) -> list[Any]:
    a, b = _pointwise(2)(draw, dtype)
    return [a, torch.where(b.abs() < 0.1, 0.5, b).to(dtype)]


def _gelu(draw: Draw, dtype: torch.dtype) -> list[Any]:
    return [*_pointwise(1)(draw, dtype), draw(st.sampled_from(["none", "tanh"]))]


def _softmax(draw: Draw, dtype: torch.dtype) -> list[Any]:
    (x,) = _pointwise(1)(draw, dtype)
    return [x, draw(st.integers(0, max(x.dim() - 1, 0)))]


def _reduce(draw: Draw, dtype: torch.dtype) -> list[Any]:
    (x,) = _pointwise(1)(draw, dtype)
    dims = draw(st.sets(st.integers(0, x.dim() - 1), max_size=x.dim())) if x.dim() else ()
    return [x, tuple(sorted(dims)), draw(st.booleans())]


def _softmax_cross_entropy(draw: Draw, dtype: torch.dtype) -> list[Any]:
    rows, c = draw(SIZES), draw(SIZES)
    target = torch.randint(c, (rows,))
    ignore = draw(st.sampled_from([-100, 0]))
    if ignore == 0:
        target[0] = c - 1
    smoothing = draw(st.sampled_from([0.0, 0.1]))
    reduction = draw(st.sampled_from(["mean", "sum", "none"])) if c > 1 else "sum"
    return [tensor(draw, (rows, c), dtype), target, ignore, smoothing, reduction]


def _attention_scores(draw: Draw, dtype: torch.dtype) -> list[Any]:
    s, t, d = draw(SIZES), draw(SIZES), draw(SIZES)
    left, right = draw(st.sampled_from([((), ()), ((2,), (2,)), ((2, 3), (2, 1))]))
    q, k = tensor(draw, (*left, s, d), dtype), tensor(draw, (*right, t, d), dtype)
    mask = draw(st.sampled_from([None, "add", "bool"]))
    if mask == "bool":
        keep = torch.rand(s, t) > 0.3
        keep[:, 0] = True
        return [q, k, d**-0.5, keep, draw(st.booleans())]
    return [q, k, d**-0.5, tensor(draw, (s, t), dtype) if mask else None, draw(st.booleans())]


MAKE: dict[str, Callable[[Draw, torch.dtype], list[Any]]] = {
    "linear": _linear,
    "matmul": _matmul,
    "gelu_linear": _gelu_linear,
    "layer_norm_linear": _layer_norm_linear,
    "linear_batch_norm_relu": _linear_batch_norm_relu,
    "softmax": _softmax,
    "softmax_cross_entropy": _softmax_cross_entropy,
    "attention_scores": _attention_scores,
    "gelu": _gelu,
    "div": _div,
    **dict.fromkeys(("sum", "mean", "max", "min"), _reduce),
    **dict.fromkeys(("relu", "silu"), _pointwise(1)),
    **dict.fromkeys(("add", "sub", "mul", "add_relu", "mul_relu"), _pointwise(2)),
    "affine": _pointwise(3),
}


def leaves(op: Op, case: list[Any], wide: bool = False) -> list[Any]:
    """Private arguments in the same memory layout; the floating ones that have a gradient require it."""
    made = []
    for p, a in zip(op.params, case, strict=False):
        if isinstance(a, Tensor):
            a = tolerance.wide(a).clone() if wide else a.detach()
            if p.name in op.mutates:
                a = a.clone()
            elif a.is_floating_point():
                a = a.requires_grad_()
        made.append(a)
    return made


def gradients(out: Tensor, given: list[Any], dy: Tensor) -> list[Tensor | None]:
    wanted = [a for a in given if isinstance(a, Tensor) and a.requires_grad]
    return list(torch.autograd.grad(out, wanted, dy, allow_unused=True))


def candidates(op: Op, case: list[Any], dtype: torch.dtype) -> list[str]:
    """Those that admit the case; bf16 is wrong in Triton's interpreter."""
    ids = [EAGER]
    for id in op.candidates:
        kernel = id.startswith("triton.")
        if id == EAGER or (kernel and hardware.interpreting() and dtype is torch.bfloat16):
            continue
        if runnable(op, case, id):
            ids.append(id)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(MAKE))
def test_random_calls_match_float64(name: str) -> None:
    op = OPS[name]

    @settings(
        max_examples=22,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data(), DTYPES, st.integers(0, 2**31))
    def check(data: st.DataObject, dtype: torch.dtype, seed: int) -> None:
        torch.manual_seed(seed)
        case = MAKE[name](data.draw, dtype)
        id = data.draw(st.sampled_from(candidates(op, case, dtype)))
        with torch.no_grad():
            want = reference(op, case)
            plain = op.reference(*leaves(op, case), *([False] if op.gradient else []))[0]
            before = [a.clone() if isinstance(a, Tensor) else a for a in case]
            with tensorlogic.policy(force=id):
                out = dispatcher.call(op, tuple(leaves(op, case)))
        assert out.stride() == plain.stride() or not out.numel(), (id, out.stride(), plain.stride())
        verdict = tolerance.judge((out,), (plain,), (want,))
        assert verdict, f"{id}: {verdict.reason}"
        for a, b in zip(case, before, strict=True):
            assert not isinstance(a, Tensor) or torch.equal(a, b), f"{id} changed an input"
        if dtype is torch.float32 and name not in ("max", "min"):
            _check_gradients(op, id, case, want)

    check()


def _check_gradients(op: Op, id: str, case: list[Any], want: Tensor) -> None:
    dy = torch.randn(want.shape)
    mine, wide = leaves(op, case), leaves(op, case, wide=True)
    with tensorlogic.policy(force=id):
        got = gradients(dispatcher.call(op, tuple(mine)), mine, dy)
    refs = gradients(op.reference(*wide, True)[0], wide, dy.double())
    for g, r in zip(got, refs, strict=True):
        assert (g is None) == (r is None)
        if g is not None and r is not None:
            torch.testing.assert_close(
                g.double(), r, rtol=1e-3, atol=1e-4, msg=lambda m: f"{id}: {m}"
            )


def test_every_op_is_drawn() -> None:
    assert set(PUBLIC) - {"dropout_linear"} == MAKE.keys()
