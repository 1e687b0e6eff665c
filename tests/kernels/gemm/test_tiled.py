"""The matrix product family: prologues and epilogues against float64."""

from __future__ import annotations

import itertools
import os
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

pytest.importorskip("triton")
from tensorlogic.kernels.gemm import bind, tiled
from tensorlogic.kernels.gemm.spec import GemmSpec, Operand
from tensorlogic.ops.common.dropout_rng import keep_mask

from ...support.gemm import ACTS, COLUMNWISE, EPS, OFFSET, SEED, SMALL, K, M, N, P, check, operand
from ...support.triton import DEVICE, TORCH

STRATEGIES = {
    "tiled": SMALL,
    "split": SMALL | {"SPLIT": 3},
    "rows": SMALL | {"BLOCK_M": 4},
    "rows_split": SMALL | {"BLOCK_M": 8, "SPLIT": 2},
}
LAYOUTS = ("row", "column", "padded")


@pytest.mark.parametrize(
    "layouts",
    [" ".join(three) for three in itertools.product(LAYOUTS[:2], repeat=3)]
    + ["padded padded padded"],
)
def test_layouts(layouts: str) -> None:
    check(layouts=layouts, bias="f16")


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", TORCH)
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
    bind.gemm_launcher(spec, SMALL, DEVICE)(x, torch.eye(K, device=DEVICE), y, EPS)
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
    bind.gemm_launcher(spec, SMALL, DEVICE)(
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
    assert tiled._wide(huge)
    assert not tiled._wide(replace(huge, m=2**15))


def test_wide_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "_wide", lambda spec: True)
    check(
        STRATEGIES["split"], prologue="dropout", keep=dropped(M, K), outer="residual", x_out="f16"
    )
