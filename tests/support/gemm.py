"""What tests of matrix products in Triton share: one product with everything around it, against float64, and its configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .triton import DEVICE, GUARD, TORCH

from tensorlogic.kernels.gemm import bind, tiled  # isort: skip  (after the interpreter is asked for)
from tensorlogic.kernels.gemm.spec import GemmSpec

from tensorlogic.kernels.gemm.spec import Operand  # isort: skip

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
M, N, K = 19, 35, 37
P, EPS = 0.3, 1e-3
SEED, OFFSET = 2**40 + 7, 2**33 + 3
COLUMNWISE = ("bias", "mean", "var", "scale", "shift")
RING = {  # CONSUMERS, BLOCK_N, BLOCK_K, STAGES
    "one": (1, 32, 128, 4),
    "two": (2, 128, 64, 3),
    "three": (3, 64, 64, 3),
}


def matrix(
    rows: int, columns: int, dtype: str, layout: str = "row", batch: int = 0, scale: float = 1.0, pad: int = 7,
) -> Tensor:  # fmt: skip
    """Random, [batch,] rows x columns; beyond a padded row lies NaN, which no kernel may touch."""
    shape = [batch] * bool(batch) + [rows, columns]
    values = torch.randn(shape, device=DEVICE) * scale
    if layout == "column":
        place = torch.empty([*shape[:-2], columns, rows], device=DEVICE, dtype=TORCH[dtype]).mT
    else:
        wide = columns + (pad if layout == "padded" else 0)
        count = wide * rows * max(batch, 1)
        whole = torch.full((count + GUARD,), torch.nan, device=DEVICE, dtype=TORCH[dtype])
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
    t["x_out"] = torch.full(t["x"].shape, torch.nan, device=DEVICE, dtype=TORCH[dtype])
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
    assert tiled.gemm_refusal(spec) is None
    want = expected(
        spec,
        {name: t[name] for name in tiled.gemm_arguments(spec, config | {"SPLIT": 1}) if name in t},
        keep,
    )
    for name in outputs:
        t[name].fill_(torch.nan)
    floats, counters = tiled.gemm_workspace(spec, config)
    t["space"] = torch.full((floats,), torch.nan, device=DEVICE)
    t["counter"] = torch.zeros(counters, device=DEVICE, dtype=torch.int32)
    numbers = {"p": P, "eps": EPS, "seed_value": SEED, "offset_value": OFFSET}
    given = [t[name] if name in t else numbers[name] for name in tiled.gemm_arguments(spec, config)]
    launch = bind.gemm_launcher(spec, config, DEVICE)
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


def specialised(shape: tuple[int, int, int, int], programs: int) -> dict[str, Any]:
    """A configuration of the warp-specialised kernel."""
    consumers, block_n, block_k, stages = shape
    return {
        "CONSUMERS": consumers, "BLOCK_M": 64 * consumers, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": stages,
        "GROUP_M": 2, "SPLIT": 1, "programs": programs, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
