"""The matrix product family: prologues and epilogues against float64."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")
from tensorlogic.ops.common import gemm
from tensorlogic.ops.common.gemm import GemmSpec, Operand
from tensorlogic.ops.common.random import keep_mask

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
TOLERANCE = {"f16": 2e-3, "bf16": 1.6e-2, "f32": 1e-5}  # of the largest element
ACTS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
SMALL = {
    "BLOCK_M": 16,
    "BLOCK_N": 32,
    "BLOCK_K": 16,
    "GROUP_M": 2,
    "SPLIT": 1,
    "num_warps": 4,
    "num_stages": 3,
}
STRATEGIES = {
    "tiled": SMALL,
    "split": SMALL | {"SPLIT": 3},
    "rows": SMALL | {"BLOCK_M": 4},
    "rows_split": SMALL | {"BLOCK_M": 8, "SPLIT": 2},
}
M, N, K = 19, 35, 37
GUARD = 64  # elements behind a matrix that no kernel may touch
P, EPS = 0.3, 1e-3
SEED, OFFSET = 2**40 + 7, 2**33 + 3
COLUMNWISE = ("bias", "mean", "var", "scale", "shift")
LAYOUTS = ("row", "column", "padded")


def matrix(
    rows: int, columns: int, dtype: str, layout: str = "row", batch: int = 0, scale: float = 1.0, pad: int = 7,
) -> Tensor:  # fmt: skip
    """Random, [batch,] rows x columns; beyond a padded row lies NaN, which no kernel may touch."""
    shape = [batch] * bool(batch) + [rows, columns]
    values = torch.randn(shape, device=DEVICE) * scale
    if layout == "column":
        place = torch.empty([*shape[:-2], columns, rows], device=DEVICE, dtype=DTYPES[dtype]).mT
    else:
        wide = columns + (pad if layout == "padded" else 0)
        count = wide * rows * max(batch, 1)
        whole = torch.full((count + GUARD,), torch.nan, device=DEVICE, dtype=DTYPES[dtype])
        place = whole[:count].view(*shape[:-1], wide)[..., :columns]
    return place.copy_(values)


def beside(tensor: Tensor) -> Tensor:
    """A copy of all memory that `tensor` is a view of, as bytes, with zeros where it is."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = torch.as_strided(tensor, (count,), (1,), 0).clone()
    torch.as_strided(whole, tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    return whole.view(torch.uint8)


def operand(tensor: Tensor, dtype: str) -> Operand:
    return Operand(
        dtype, tensor.stride(-2), tensor.stride(-1), tensor.stride(0) if tensor.ndim == 3 else 0
    )


def act_grad(kind: str, saved: Tensor) -> Tensor:
    if kind == "relu":
        return (saved > 0).double()
    leaf = saved.detach().clone().requires_grad_()
    ACTS[kind](leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def expected(spec: GemmSpec, t: dict[str, Tensor], keep: Tensor | None) -> dict[str, Tensor]:
    """What `spec` means, in float64; `keep`: dropout's mask of the [tokens, features] matrix."""
    d = {name: tensor.double() for name, tensor in t.items()}
    x, found = d["x"], {}
    tokens = x.mT if spec.transposed else x
    if spec.prologue == "activation":
        tokens = ACTS[spec.kind](tokens)
    elif spec.prologue == "gradient":
        tokens = tokens * act_grad(spec.kind, d["saved"].mT if spec.transposed else d["saved"])
    elif spec.prologue == "dropout":
        assert keep is not None
        tokens = torch.where(keep, tokens / (1 - P), 0.0)
    elif spec.prologue in ("layer_norm", "rms_norm"):
        mean = (
            tokens.mean(1)
            if spec.prologue == "layer_norm"
            else torch.zeros(len(tokens), dtype=torch.double, device=DEVICE)
        )
        rstd = ((tokens - mean[:, None]).square().mean(1) + EPS).rsqrt()
        if not spec.inline:
            mean, rstd = d.get("row_mean", mean), d["row_rstd"]
        found |= {"row_mean": mean, "row_rstd": rstd}
        tokens = (tokens - mean[:, None]) * rstd[:, None] * d.get("gamma", 1.0) + d.get("beta", 0.0)
    x = tokens.mT if spec.transposed else tokens
    found |= {"x_out": x, "row_sum": x.sum(-1)}
    z = x @ d["w"] + d.get("bias", 0.0) - d.get("mean", 0.0)
    if spec.var:
        z = z * (d["var"] + EPS).rsqrt()
    z = z * d.get("scale", 1.0) + d.get("shift", 0.0)
    if spec.outer == "residual":
        z = z + d["residual"]
    elif spec.outer == "gradient":
        z = z * act_grad(spec.kind, d["residual"])
    elif spec.outer == "dropout":
        assert keep is not None
        z = torch.where(keep, z / (1 - P), 0.0)
    return found | {"z": z, "y": ACTS[spec.activation](z)}


def check(
    config: dict[str, Any] = SMALL, dtype: str = "f16", layouts: str = "row column row",
    m: int = M, n: int = N, k: int = K, batch: int = 0, shared_weight: bool = False,
    keep: Tensor | None = None, align: int = 2, residual_pad: int | None = None, **options: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Run one product with its outputs poisoned, compare each with float64; returns all tensors."""
    x_layout, w_layout, y_layout = layouts.split()
    pad = 7 if align < 16 else 8
    tokens, features = (k, m) if options.get("transposed") else (m, k)
    t = {
        "x": matrix(m, k, dtype, x_layout, batch, pad=pad),
        "w": matrix(
            k, n, dtype, w_layout, 0 if shared_weight else batch, k**-0.5 if k else 1.0, pad
        ),
        "y": matrix(m, n, dtype, y_layout, batch, pad=pad).fill_(torch.nan),
        "saved": matrix(m, k, dtype, x_layout, batch, pad=pad),
        "residual": matrix(
            m, n, dtype, "padded", batch, pad=pad if residual_pad is None else residual_pad
        ),
        "seed": torch.tensor([SEED, OFFSET], device=DEVICE),
        "gamma": torch.randn(features, device=DEVICE),
        "beta": torch.randn(features, device=DEVICE),
        "row_mean": torch.randn(tokens, device=DEVICE),
        "row_rstd": torch.rand(tokens, device=DEVICE) + 0.5,
        "bias": matrix(1, n, dtype)[0],
        "mean": torch.randn(n, device=DEVICE),
        "var": torch.rand(n, device=DEVICE) + 0.1,
        "scale": torch.randn(n, device=DEVICE),
        "shift": matrix(1, n, dtype)[0],
    }
    if (
        options.get("kind") == "relu"
    ):  # what relu's gradient is given is relu's output, zeros and all
        t["saved"].relu_()
        t["residual"].relu_()
    t["z"] = matrix(m, n, dtype, y_layout, batch, pad=pad).fill_(torch.nan)  # with y's strides
    t["x_out"] = torch.full(t["x"].shape, torch.nan, device=DEVICE, dtype=DTYPES[dtype])
    t["row_sum"] = torch.full((m,), torch.nan, device=DEVICE)
    outputs = {"y"} | {name for name in ("z", "x_out", "row_sum") if options.get(name)}
    if options.get("inline"):
        outputs |= {"row_rstd"} | ({"row_mean"} if options["prologue"] == "layer_norm" else set())
        options["save_statistics"] = True
    operands = {name: operand(t[name], dtype) for name in ("x", "w", "y")}
    if options.get("prologue") == "gradient":
        operands["saved"] = operand(t["saved"], dtype)
    if options.get("outer") in ("residual", "gradient"):
        operands["residual"] = operand(t["residual"], dtype)
    spec = GemmSpec(m, n, k, **operands, batch=batch or 1, align=align, **options)
    assert gemm.gemm_refusal(spec) is None
    want = expected(
        spec,
        {name: t[name] for name in gemm.gemm_arguments(spec, config | {"SPLIT": 1}) if name in t},
        keep,
    )
    for name in outputs:
        t[name].fill_(torch.nan)
    floats, counters = gemm.gemm_workspace(spec, config)
    t["space"] = torch.full((floats,), torch.nan, device=DEVICE)
    t["counter"] = torch.zeros(counters, device=DEVICE, dtype=torch.int32)
    numbers = {"p": P, "eps": EPS, "seed_value": SEED, "offset_value": OFFSET}
    given = [t[name] if name in t else numbers[name] for name in gemm.gemm_arguments(spec, config)]
    launch = gemm.gemm_launcher(spec, config, DEVICE)
    before = {name: beside(t[name]) for name in outputs}
    for _ in range(
        1 + (config["SPLIT"] > 1)
    ):  # a second run finds the counters as the first one left them
        assert launch(*given)
        for name in sorted(outputs):
            worst, most = (
                (t[name].double() - want[name]).abs().max() if want[name].numel() else 0.0,
                want[name].abs().max(),
            )
            assert worst <= TOLERANCE[dtype] * max(1.0, most), f"{name}: off by {worst} of {most}"
            assert torch.equal(beside(t[name]), before[name]), f"written beside {name}"
    assert not t["counter"].any()
    return t


@pytest.mark.parametrize(
    "layouts",
    [" ".join(three) for three in itertools.product(LAYOUTS[:2], repeat=3)]
    + ["padded padded padded"],
)
def test_layouts(layouts: str) -> None:
    check(layouts=layouts, bias="f16")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_strategies_and_dtypes(strategy: str, dtype: str) -> None:
    check(STRATEGIES[strategy], dtype, bias=dtype, outer="residual", activation="relu", z=dtype)


@pytest.mark.parametrize(
    "size",
    [
        *[(1, 1, 1), (M, N, 1), (32, 32, 32), (M, N, 0)],
        *[(19, 32, 64), (16, 33, 64), (16, 32, 60)],  # one side alone that blocks do not divide
    ],
)
@pytest.mark.parametrize("strategy", ["tiled", "split", "rows"])
def test_sizes(size: tuple[int, int, int], strategy: str) -> None:
    m, n, k = size
    check(STRATEGIES[strategy], m=m, n=n, k=k, bias="f16")


@pytest.mark.parametrize("activation", ACTS)
def test_activations_and_saved_pre_activation(activation: str) -> None:
    check(activation=activation, bias="f16", z="f16")


@pytest.mark.parametrize("columnwise", [("scale",), ("shift",), ("scale", "shift"), COLUMNWISE])
@pytest.mark.parametrize("strategy", ["tiled", "split"])
def test_columnwise_scale_and_batch_norm(columnwise: tuple[str, ...], strategy: str) -> None:
    dtypes = {"bias": "f16", "shift": "f16"}
    check(
        STRATEGIES[strategy],
        activation="relu",
        **{name: dtypes.get(name, "f32") for name in columnwise},
    )


@pytest.mark.parametrize("strategy", ["tiled", "rows_split"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
def test_activation_prologue(strategy: str, transposed: bool, kind: str) -> None:
    check(STRATEGIES[strategy], prologue="activation", kind=kind, transposed=transposed, bias="f16")


@pytest.mark.parametrize("prologue", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("statistics", ["given", "inline", "transposed"])
@pytest.mark.parametrize("strategy", ["tiled", "rows_split"])
def test_norm_prologues(prologue: str, statistics: str, strategy: str) -> None:
    beta = "f32" if prologue == "layer_norm" else None
    layouts = "column row column" if statistics == "transposed" else "padded column row"
    check(
        STRATEGIES[strategy], layouts=layouts, prologue=prologue, gamma="f32", beta=beta,
        bias="f16", inline=statistics == "inline", transposed=statistics == "transposed",
    )  # fmt: skip


def test_inline_statistics_of_rows_far_from_zero() -> None:
    x = torch.randn(M, K, device=DEVICE) + 3000.0
    spec = GemmSpec(
        M,
        K,
        K,
        operand(x, "f32"),
        Operand("f32", K, 1),
        operand(x, "f32"),
        prologue="layer_norm",
        inline=True,
        align=4,
    )
    y = torch.full_like(x, torch.nan)
    gemm.gemm_launcher(spec, SMALL, DEVICE)(x, torch.eye(K, device=DEVICE), y, EPS)
    torch.testing.assert_close(
        y.double(), F.layer_norm(x.double(), [K], eps=EPS), rtol=0, atol=2e-3
    )


@pytest.mark.parametrize("strategy", ["split", "rows"])
@pytest.mark.parametrize("kind", ["relu", "gelu", "gelu_tanh", "silu"])
def test_backward_products(strategy: str, kind: str) -> None:
    """dx with dz on the way; dw with the bias gradient; the gradient of an activation prologue."""
    config = STRATEGIES[strategy]
    check(config, layouts="padded row row", prologue="gradient", kind=kind, x_out="f16")
    check(config, layouts="column row column", prologue="gradient", kind=kind, row_sum="f32")
    check(config, layouts="row row row", outer="gradient", kind=kind)


def dropped(rows: int, columns: int) -> Tensor:
    """The mask of a [rows, columns] matrix, read off a matrix of ones."""
    x = torch.ones(rows, columns, device=DEVICE)
    spec = GemmSpec(
        rows,
        1,
        columns,
        operand(x, "f32"),
        Operand("f32", 1, 1),
        Operand("f32", 1, 1),
        prologue="dropout",
        x_out="f32",
        align=4,
    )
    out, y = torch.full_like(x, torch.nan), torch.empty(rows, 1, device=DEVICE)
    seed = torch.tensor([SEED, OFFSET], device=DEVICE)
    gemm.gemm_launcher(spec, SMALL, DEVICE)(
        x, torch.ones(columns, 1, device=DEVICE), seed, y, out, P
    )
    torch.testing.assert_close(out[out != 0], torch.full_like(out[out != 0], 1 / (1 - P)))
    return out != 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropout_has_one_mask_in_all_directions(strategy: str) -> None:
    config = STRATEGIES[strategy]
    check(config, keep=dropped(M, K), prologue="dropout", bias="f16")
    check(
        config, keep=dropped(K, M), prologue="dropout", transposed=True, layouts="column row column"
    )
    check(config, keep=dropped(M, N), outer="dropout")
    check(config, keep=dropped(M, K), prologue="dropout", seeded=True)
    check(config, keep=dropped(M, N), outer="dropout", seeded=True)


def test_dropout_mask_is_the_reference_s() -> None:
    assert torch.equal(dropped(M, K), keep_mask((M, K), P, SEED, OFFSET, DEVICE))


def test_dropout_rate() -> None:
    kept = dropped(100, 200).double().mean().item()
    assert abs(kept - (1 - P)) < 4 * (P * (1 - P) / 20000) ** 0.5


@pytest.mark.parametrize("shared_weight", [True, False])
@pytest.mark.parametrize("strategy", ["tiled", "split"])
def test_batches(shared_weight: bool, strategy: str) -> None:
    shape = {"m": 17, "n": 20, "k": 33, "batch": 3, "shared_weight": shared_weight}
    check(
        STRATEGIES[strategy],
        activation="gelu_tanh",
        outer="residual",
        z="f16",
        layouts="padded row column",
        **shape,
    )
    check(STRATEGIES[strategy], prologue="gradient", kind="silu", x_out="f16", **shape)


def test_outputs_do_not_touch_what_lies_between() -> None:
    t = check(layouts="row row padded")
    between = t["y"].as_strided((M - 1, 7), (t["y"].stride(0), 1), t["y"].storage_offset() + N)
    assert between.isnan().all()


def test_split_gives_the_same_bits_and_wide_offsets_the_same_values() -> None:
    torch.manual_seed(0)
    first = check(STRATEGIES["split"], bias="f16")["y"]
    torch.manual_seed(0)
    assert torch.equal(first, check(STRATEGIES["split"], bias="f16")["y"])
    huge = GemmSpec(
        2**17, 64, 2**15, Operand("f16", 2**15, 1), Operand("f16", 64, 1), Operand("f16", 64, 1)
    )
    assert gemm._wide(huge)
    assert not gemm._wide(replace(huge, m=2**15))


def test_wide_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_wide", lambda spec: True)
    check(
        STRATEGIES["split"], prologue="dropout", keep=dropped(M, K), outer="residual", x_out="f16"
    )
