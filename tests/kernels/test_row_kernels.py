"""Element-wise, reduction and row kernels against float64: on a GPU, else in the interpreter."""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")

import tensorlogic
from tensorlogic.kernels.cross_entropy import rows as cross_entropy_rows
from tensorlogic.kernels.elementwise import elementwise as elementwise_elementwise
from tensorlogic.kernels.norm import layer_norm as norm_layer_norm
from tensorlogic.kernels.reduce import contiguous as reduce_contiguous
from tensorlogic.kernels.softmax import rows as softmax_rows

from ..support.helpers import far_rows
from ..support.triton import (
    DEVICE,
    REDUCE,
    TORCH,
    Config,
    close,
    poisoned,
    rand,
)
from ..support.triton import default_device as default_device  # a fixture

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on infinities


FORWARD = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "neg": lambda a: -a,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda a: F.gelu(a, approximate="tanh"),
    "silu": F.silu,
    "add_relu": lambda a, b: torch.relu(a + b),
    "mul_relu": lambda a, b: torch.relu(a * b),
    "affine": lambda x, s, b: x * s + b,
}
BACKWARD = {"gelu": "gelu_bwd", "gelu_tanh": "gelu_tanh_bwd", "silu": "silu_bwd", "mul": "mul_bwd",
            "div": "div_bwd", "mul_relu": "mul_relu_bwd"}  # fmt: skip


def shaped(mode: str, rows: int, columns: int, dtype: str, seed: int) -> torch.Tensor:
    shape = {"full": (rows, columns), "row": (columns,), "column": (rows, 1), "one": (1,)}[mode]
    return rand(*shape, dtype=dtype, seed=seed)


@pytest.mark.parametrize("op", FORWARD)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_elementwise_forward(op: str, dtype: str) -> None:
    inputs = elementwise_elementwise.ELEMENTWISE[op][0]
    for modes in {
        ("full",) * inputs,
        ("full", "row", "row")[:inputs],
        ("one", "full", "column")[:inputs],
        ("full", "column", "one")[:inputs],
    }:
        if inputs == 1 and modes != ("full",):
            continue
        rows, columns = 5, 37
        args = [shaped(mode, rows, columns, dtype, i) for i, mode in enumerate(modes)]
        args[0].view(-1)[0] = float("nan")
        args[-1].view(-1)[-1] = float("inf")
        want = FORWARD[op](*(a.double() for a in args)).expand(rows, columns)
        configs = (
            {"strategy": "flat", "BLOCK": 64, "stream": False, "num_warps": 4},
            {"strategy": "rows", "BLOCK_R": 2, "BLOCK_C": 16, "stream": True, "num_warps": 4},
        )
        for config in configs:
            y = poisoned(rows, columns, dtype=dtype)
            names = [dtype] * (inputs + 1)
            run = elementwise_elementwise.elementwise_launcher(
                op, names, rows, columns, modes, config, DEVICE
            )
            assert run(*args, y)
            close(y, want.to(TORCH[dtype]), dtype, 0.1)


@pytest.mark.parametrize("op", BACKWARD)
def test_elementwise_backward(op: str) -> None:
    inputs = elementwise_elementwise.ELEMENTWISE[op][0]
    args = [rand(3, 21, seed=i) for i in range(inputs)]
    dy = rand(3, 21, seed=9)
    leaves = [a.double().requires_grad_() for a in args]
    want = torch.autograd.grad(FORWARD[op](*leaves), leaves, dy.double())
    config = {"strategy": "flat", "BLOCK": 16, "stream": False, "num_warps": 4}
    name = BACKWARD[op]
    into, out = elementwise_elementwise.ELEMENTWISE[name]
    run = elementwise_elementwise.elementwise_launcher(
        name, ["f32"] * (into + out), 3, 21, ["full"] * into, config, DEVICE
    )
    got = [poisoned(3, 21) for _ in want]
    assert run(dy, *args, *got)
    for g, w in zip(got, want, strict=True):
        close(g, w, "f32")


def test_elementwise_relu_backward_keeps_nan_gradients() -> None:
    y = torch.tensor([0.0, 1.0, float("nan"), 2.0])
    dy = torch.tensor([1.0, 2.0, 3.0, float("nan")])
    dx = poisoned(4)
    config = elementwise_elementwise.elementwise_configs(["f32"], 1, 4, ["full", "full"])[0]
    assert elementwise_elementwise.elementwise_launcher(
        "relu_bwd", ["f32"] * 3, 1, 4, ["full"] * 2, config, DEVICE
    )(dy, y, dx)
    close(dx, torch.tensor([0.0, 2.0, 3.0, float("nan")]), "f32")


@pytest.mark.parametrize(
    ("kind", "last"), [("sum", True), ("sum", False), ("mean", True), ("max", False), ("min", True)]
)
@pytest.mark.parametrize(
    "shape", [(1, 1000, 1), (3, 257, 1), (5, 7, 1), (1, 100, 19), (3, 33, 8), (1, 1, 1)]
)
def test_reduce(kind: str, shape: tuple[int, int, int], last: bool) -> None:
    outer, reduce, inner = shape
    x = rand(*shape, dtype="f16")
    configs = [
        {
            "strategy": "columns",
            "parts": p,
            "last": last,
            "BLOCK_R": 4,
            "BLOCK_C": 8,
            "num_warps": 4,
        }
        for p in (1, 3)
    ]
    if inner == 1:
        configs = [
            {"strategy": "split", "parts": p, "last": last, "BLOCK": 32, "num_warps": 4}
            for p in (1, 5)
        ]
        configs.append(
            {
                "strategy": "rows",
                "parts": 1,
                "last": False,
                "BLOCK_R": 2,
                "BLOCK_C": 16,
                "num_warps": 4,
            }
        )
    for special in (None, float("nan"), float("inf")):
        if special is not None:
            x[-1, reduce // 2, 0] = special
        for config in configs:
            partials, counters = reduce_contiguous.reduce_workspace(*shape, config)
            partial = torch.full((max(partials, 1),), float("nan"))
            counter = torch.zeros(max(counters, 1), dtype=torch.int32)
            run = reduce_contiguous.reduce_launcher(kind, "f16", "f32", *shape, config, DEVICE)
            for _ in range(2):  # the second call finds the counters as the first left them
                y = poisoned(outer, inner)
                assert run(x, y, partial, counter)
                close(y, REDUCE[kind](x.double()), "f32")
                assert counter.eq(0).all()


@pytest.mark.parametrize("parts", [1, 3])
def test_reduce_product_of_columns(parts: int) -> None:
    x, w, y = rand(2, 50, 9), rand(2, 50, 9, seed=1), poisoned(2, 9)
    config = {
        "strategy": "columns",
        "parts": parts,
        "last": True,
        "BLOCK_R": 4,
        "BLOCK_C": 16,
        "num_warps": 4,
    }
    run = reduce_contiguous.reduce_launcher(
        "sum", "f32", "f32", 2, 50, 9, config, DEVICE, product=True
    )
    assert run(x, w, y, torch.empty(2 * parts * 9), torch.zeros(2, dtype=torch.int32))
    close(y, (x.double() * w.double()).sum(1), "f32")


ROWS = (
    {"strategy": "registers", "BLOCK_R": 2, "BLOCK_C": 128, "num_warps": 4},
    {"strategy": "online", "LANES": 4, "WIDTH": 8, "num_warps": 4},
)


@pytest.mark.parametrize("config", ROWS, ids=lambda c: c["strategy"])
@pytest.mark.parametrize("columns", [1, 31, 64, 101])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_softmax(config: Config, columns: int, dtype: str) -> None:
    x = rand(5, columns, dtype=dtype, scale=4.0)
    x[1, 0] = float("inf")
    x[2, :] = float("-inf")
    x[3, columns // 2] = float("nan")
    x[4, : columns // 2] = float("-inf")
    y = poisoned(5, columns, dtype=dtype)
    assert softmax_rows.softmax_launcher(5, columns, dtype, dtype, config, DEVICE)(x, y)
    close(y, torch.softmax(x.double(), -1).to(TORCH[dtype]), dtype, 0.01)
    y, dy, dx = (
        torch.softmax(x.float(), -1).to(TORCH[dtype]),
        rand(5, columns, dtype=dtype),
        poisoned(5, columns, dtype=dtype),
    )
    assert softmax_rows.softmax_backward_launcher(5, columns, (dtype,) * 3, config, DEVICE)(
        y, dy, dx, 0.5
    )
    p, g = y.double(), dy.double()
    close(dx, 0.5 * p * (g - (p * g).sum(-1, keepdim=True)), dtype, 0.5)


@pytest.mark.parametrize("config", ROWS, ids=lambda c: c["strategy"])
@pytest.mark.parametrize(
    ("columns", "last"), [(3, True), (7, False), (64, True), (101, True), (101, False)]
)
@pytest.mark.parametrize("reduction_", ["none", "sum", "mean"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy(
    config: Config, columns: int, last: bool, reduction_: str, smoothing: float
) -> None:
    rows = 9
    x = rand(rows, columns, scale=3.0)
    t = torch.arange(rows) * 5 % columns
    t[4] = t[6] = 3  # the last row counts
    x[1, (t[1] + 1) % columns] = float("-inf") if not smoothing else 0.0
    ignore = 3
    leaf = x.double().requires_grad_()
    want = F.cross_entropy(
        leaf, t, reduction=reduction_, ignore_index=ignore, label_smoothing=smoothing
    )
    dy = rand(rows) if reduction_ == "none" else torch.tensor([1.7])
    (grad,) = torch.autograd.grad(want, leaf, dy.double().reshape(want.shape))
    loss, lse, y, share = poisoned(rows), poisoned(rows), poisoned(1), poisoned(1)
    counter = torch.zeros(1, dtype=torch.int64)
    run = cross_entropy_rows.cross_entropy_launcher(
        rows, columns, "f32", "f32", reduction_, ignore, {**config, "last": last}, DEVICE,
        smooth=smoothing > 0, save=True,
    )  # fmt: skip
    for _ in range(2):
        assert run(x, t, loss, lse, y, share, counter, smoothing)
        assert counter.item() == 0
        close(loss if reduction_ == "none" else y[0], want.detach(), "f32")
    keep = t != ignore
    close(share[0], 1 / keep.sum() if reduction_ == "mean" else torch.ones(()), "f32", 0.1)
    close(lse[keep], torch.logsumexp(x.double(), 1)[keep], "f32")
    for block in ({"BLOCK_R": 2, "BLOCK_C": 32}, {"BLOCK_R": 1, "BLOCK_C": 128}):
        dx = poisoned(rows, columns)
        back = cross_entropy_rows.cross_entropy_backward_launcher(
            rows, columns, "f32", "f32", reduction_, ignore, {**block, "num_warps": 4}, DEVICE, smooth=smoothing > 0
        )  # fmt: skip
        assert back(x, t, lse, dy, share, dx, smoothing)
        close(dx, grad, "f32", 0.1)


@pytest.mark.parametrize("spared", [0, 1 << 40], ids=["passed by", "read"])
@pytest.mark.parametrize("rows_held", [2, 16], ids=["many programs", "one program"])
@pytest.mark.parametrize("reduction_", ["none", "sum", "mean"])
def test_ignored_rows_count_for_nothing(
    monkeypatch: pytest.MonkeyPatch, spared: int, rows_held: int, reduction_: str
) -> None:
    monkeypatch.setattr(cross_entropy_rows, "SPARED", spared)
    rows, columns = 9, 40
    x, t = rand(rows, columns, scale=3.0), torch.arange(rows)
    t[2] = t[5] = -100
    x[2] = float("nan")  # a row that is read must not be heard either
    x[5, 3] = float("inf")
    counted = t != -100
    leaf = x[counted].double().requires_grad_()
    want = F.cross_entropy(leaf, t[counted], reduction=reduction_, label_smoothing=0.1)
    dy = rand(rows) if reduction_ == "none" else torch.tensor([1.7])
    dwant = dy[counted] if reduction_ == "none" else dy.reshape(())
    (grad,) = torch.autograd.grad(want, leaf, dwant.double())
    loss, lse, y, share = poisoned(rows), poisoned(rows), poisoned(1), poisoned(1)
    counter = torch.zeros(1, dtype=torch.int64)
    held = {"strategy": "registers", "BLOCK_R": rows_held, "BLOCK_C": 64, "num_warps": 4}
    run = cross_entropy_rows.cross_entropy_launcher(
        rows, columns, "f32", "f32", reduction_, -100, {**held, "last": True}, DEVICE, smooth=True, save=True
    )  # fmt: skip
    assert run(x, t, loss, lse, y, share, counter, 0.1)
    close(loss[counted] if reduction_ == "none" else y[0], want.detach(), "f32")
    if reduction_ == "none":
        assert loss[~counted].eq(0).all()
    close(share[0], 1 / counted.sum() if reduction_ == "mean" else torch.ones(()), "f32", 0.1)
    dx = poisoned(rows, columns)
    back = cross_entropy_rows.cross_entropy_backward_launcher(
        rows, columns, "f32", "f32", reduction_, -100, {"BLOCK_R": rows_held, "BLOCK_C": 64, "num_warps": 4}, DEVICE, smooth=True
    )  # fmt: skip
    assert back(x, t, lse, dy, share, dx, 0.1)
    close(dx[counted], grad, "f32", 0.1)
    assert dx[~counted].eq(0).all()


@pytest.mark.parametrize("config", ROWS, ids=lambda c: c["strategy"])
@pytest.mark.parametrize("columns", [7, 64, 101])
def test_smoothed_cross_entropy_of_logits_far_from_zero(config: Config, columns: int) -> None:
    x, t = far_rows(columns, torch.float32)
    want = F.cross_entropy(x.double(), t, reduction="none", label_smoothing=0.1)
    loss, lse, y, share = poisoned(7), poisoned(7), poisoned(1), poisoned(1)
    run = cross_entropy_rows.cross_entropy_launcher(
        7, columns, "f32", "f32", "none", -100, {**config, "last": False}, DEVICE,
        smooth=True, save=True,
    )  # fmt: skip
    assert run(x, t, loss, lse, y, share, torch.zeros(1, dtype=torch.int64), 0.1)
    torch.testing.assert_close(loss, want.float(), rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("config", ROWS, ids=lambda c: c["strategy"])
def test_cross_entropy_of_special_rows(config: Config) -> None:
    x = rand(6, 40, dtype="f16")
    x[1, 3] = float("nan")
    x[2, :] = float("-inf")
    x[3, 5] = float("inf")
    t = torch.tensor([0, 1, 2, 3, 40, -1])
    loss, lse = poisoned(6, dtype="f16"), poisoned(6)
    run = cross_entropy_rows.cross_entropy_launcher(
        6, 40, "f16", "f16", "none", -100, {**config, "last": True}, DEVICE, save=True
    )  # fmt: skip
    other = torch.zeros(1)
    assert run(x, t, loss, lse, loss, other, other, 0.0)
    want = F.cross_entropy(x[:4].double(), t[:4], reduction="none")
    close(loss[:4], want, "f16")
    assert loss[4:].isnan().all()
    dx = poisoned(6, 40, dtype="f16")
    back = cross_entropy_rows.cross_entropy_backward_launcher(
        6, 40, "f16", "f16", "none", -100, {"BLOCK_R": 1, "BLOCK_C": 64, "num_warps": 4}, DEVICE
    )
    assert back(x, t, lse, torch.ones(6).half(), other, dx, 0.0)
    assert dx[1:4].isnan().any(1).all()
    assert dx[4:].isnan().all()
    nothing = torch.full((6,), -100)
    y, counter = poisoned(1), torch.zeros(1, dtype=torch.int64)
    mean = cross_entropy_rows.cross_entropy_launcher(
        6, 40, "f16", "f32", "mean", -100, {**config, "last": True}, DEVICE
    )
    assert mean(x, nothing, lse, lse, y, other, counter, 0.0)
    assert y.isnan().all()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("columns", [50, 64])
@pytest.mark.parametrize("config", [{"BLOCK_R": 1, "BLOCK_C": 32}, {"BLOCK_R": 2, "BLOCK_C": 64}])
def test_large_logits_cost_no_accuracy(
    smoothing: float, columns: int, config: dict[str, int]
) -> None:
    """Only their differences matter, and those are exact; PyTorch's gradients are off by 1e-7, those of a rounded lse by 5e-4."""
    rows, s = 9, smoothing
    x = rand(rows, columns, scale=3.0) + 1e4
    t = torch.arange(rows) * 5 % columns
    leaf = x.double().requires_grad_()
    F.cross_entropy(leaf, t, reduction="sum", label_smoothing=s).backward()
    assert leaf.grad is not None
    for forward in cross_entropy_rows.cross_entropy_configs(columns, "f32")[:1], cross_entropy_rows.cross_entropy_configs(9000, "f32")[:1]:  # fmt: skip
        loss, lse, other = poisoned(rows), poisoned(rows), torch.ones(1)
        run = cross_entropy_rows.cross_entropy_launcher(
            rows, columns, "f32", "f32", "none", -100, forward[0], DEVICE, smooth=s > 0, save=True
        )
        assert run(x, t, loss, lse, loss, other, other, s)
        want = F.cross_entropy(x.double(), t, reduction="none", label_smoothing=s)
        assert (loss.double() - want).abs().max() < 3e-6 + 2e-3 * s
        dx = poisoned(rows, columns)
        back = cross_entropy_rows.cross_entropy_backward_launcher(
            rows, columns, "f32", "f32", "sum", -100, {**config, "num_warps": 4}, DEVICE, smooth=s > 0
        )  # fmt: skip
        assert back(x, t, lse, other, other, dx, s)
        assert (dx.double() - leaf.grad).abs().max() < 3e-6


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_what_rows_keep_is_float32_whatever_the_default(reduction: str) -> None:
    logits, target = rand(7, 13, dtype="f16"), torch.arange(7)
    try:
        torch.set_default_dtype(torch.float64)
        with tensorlogic.policy(force="triton.rows"):
            outs = torch.ops.tensorlogic.softmax_cross_entropy(logits, target, -100, 0.0, reduction, True)  # fmt: skip
    finally:
        torch.set_default_dtype(torch.float32)
    assert [o.dtype for o in outs] == [torch.float16, torch.float32, torch.float32]


@pytest.mark.parametrize("columns", [1, 33, 64])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("looped", [True, False])
def test_layer_norm(columns: int, affine: bool, looped: bool) -> None:
    rows = 7
    x, gamma, beta = rand(rows, columns) + 100.0, rand(columns, seed=1), rand(columns, seed=2)
    wide = [v.double().requires_grad_() for v in (x, gamma, beta)]
    want = F.layer_norm(
        wide[0], (columns,), wide[1] if affine else None, wide[2] if affine else None, 1e-5
    )
    dy = rand(rows, columns, seed=3)
    config = {"strategy": "registers", "BLOCK_R": 2, "BLOCK_C": 64, "num_warps": 4}
    back = {"strategy": "fused", "parts": 2, "BLOCK_R": 2, "BLOCK_C": 64, "num_warps": 4}
    if looped:
        config = {"strategy": "looped", "BLOCK_C": 16, "num_warps": 4}
        back = {
            "strategy": "split",
            "parts": 2,
            "BLOCK_R": 2,
            "BLOCK_C": 16,
            "BLOCK": 16,
            "num_warps": 4,
        }
    y, mean, rstd = poisoned(rows, columns), poisoned(rows), poisoned(rows)
    names = ("f32", "f32", "f32")
    run = norm_layer_norm.layer_norm_launcher(
        rows, columns, names, config, DEVICE, has_gamma=affine, has_beta=affine
    )
    assert run(x, gamma, beta, y, mean, rstd, 1e-5)
    loose = 100.0  # x is 100 away from 0, which float32 inputs resolve to 8e-6
    close(y, want.detach(), "f32", loose)
    close(mean, x.double().mean(1), "f32")
    close(rstd, (x.double().var(1, correction=0) + 1e-5).rsqrt(), "f32", loose)
    statistics = norm_layer_norm.layer_norm_launcher(
        rows, columns, names, config, DEVICE, has_y=False
    )
    again, spread = poisoned(rows), poisoned(rows)
    assert statistics(x, x, x, x, again, spread, 1e-5)
    assert torch.equal(again, mean)
    assert torch.equal(spread, rstd)
    grads = torch.autograd.grad(want, wide if affine else wide[:1], dy.double())
    dx, dparams, partial = poisoned(rows, columns), poisoned(2, columns), poisoned(2 * 2 * columns)
    step = norm_layer_norm.layer_norm_backward_launcher(
        rows, columns, names, back, DEVICE, has_gamma=affine, need_params=affine
    )
    assert step(x, dy, gamma, mean, rstd, dx, dparams, partial)
    close(dx, grads[0], "f32", loose)
    if affine:
        close(dparams, torch.stack(grads[1:]), "f32", loose)
