"""Layer norm over the last dim: row statistics, forward, input gradient and parameter gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.reduce.contiguous import reduce_launcher
from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def layer_norm_fwd_registers(
    x_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, rstd_ptr, R, N, eps,
    HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_Y: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = (x - mean) * rstd * gamma + beta; rows stay in registers, so the variance is taken about the mean; float32.

    Without HAS_Y only mean [R] and rstd [R] are written: a product with normalised rows reads x itself.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    mask = (row < R)[:, None] & (col < N)[None, :]
    at = (row * N)[:, None] + col[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / (N * 1.0)
    centred = x - mean[:, None]
    square = tl.where(mask, centred * centred, 0.0)  # rounded: lanes add the same numbers up
    rstd = 1.0 / tl.sqrt_rn(tl.sum(square, 1) / (N * 1.0) + eps)
    if SAVE:
        tl.store(mean_ptr + row, mean, mask=row < R)
        tl.store(rstd_ptr + row, rstd, mask=row < R)
    if HAS_Y:
        y = centred * rstd[:, None]
        if HAS_GAMMA:
            y *= tl.load(gamma_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        if HAS_BETA:
            y += tl.load(beta_ptr + col, mask=col < N, other=0.0).to(tl.float32)[None, :]
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_fwd_looped(
    x_ptr, gamma_ptr, beta_ptr, y_ptr, mean_ptr, rstd_ptr, N, eps,
    HAS_GAMMA: tl.constexpr, HAS_BETA: tl.constexpr, HAS_Y: tl.constexpr, SAVE: tl.constexpr,
    BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `layer_norm_fwd_registers` for rows of any length: Welford's update in every lane, lanes combined once."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    col = tl.arange(0, BLOCK_C)
    centre = tl.zeros([BLOCK_C], tl.float32)
    spread = tl.zeros([BLOCK_C], tl.float32)
    count = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, N, BLOCK_C):
        mask = start + col < N
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        count = tl.where(mask, count + 1.0, count)
        delta = tl.where(mask, x - centre, 0.0)
        centre += delta * (1.0 / (start // BLOCK_C + 1.0))
        spread += delta * tl.where(mask, x - centre, 0.0)
    mean = tl.sum(centre * count, 0) / (N * 1.0)
    apart = tl.where(count > 0, centre - mean, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(spread + count * apart * apart, 0) / (N * 1.0) + eps)
    if SAVE:
        tl.store(mean_ptr + row, mean)
        tl.store(rstd_ptr + row, rstd)
    if HAS_Y:
        y_ptr += row * N
        for start in range(0, N, BLOCK_C):
            mask = start + col < N
            x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
            y = (x - mean) * rstd
            if HAS_GAMMA:
                y *= tl.load(gamma_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
            if HAS_BETA:
                y += tl.load(beta_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
            tl.store(y_ptr + start + col, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_bwd_registers(
    x_ptr, dy_ptr, gamma_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr, R, N, PARTS,
    HAS_GAMMA: tl.constexpr, NEED_DX: tl.constexpr, NEED_PARAMS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx = rstd * (g - mean(g) - xhat * mean(g * xhat)), g = dy * gamma; partial [2, PARTS, N] of dgamma and dbeta.

    x and dy are read once for all three gradients. Program p takes row tiles p, p + PARTS, ... and adds them in
    that order, so the result is the same every run; a column reduction of the partials follows.
    """
    follow(PDL)
    part = tl.program_id(0)
    col = tl.arange(0, BLOCK_C)
    live = col < N
    gamma = tl.full([BLOCK_C], 1.0, tl.float32)
    if HAS_GAMMA:
        gamma = tl.load(gamma_ptr + col, mask=live, other=0.0).to(tl.float32)
    dgamma = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    dbeta = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in range(part, tl.cdiv(R, BLOCK_R), PARTS):
        row = tl.arange(0, BLOCK_R).to(tl.int64) + tile * BLOCK_R
        mask = (row < R)[:, None] & live[None, :]
        at = (row * N)[:, None] + col[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < R, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < R, other=0.0)[:, None]
        xhat = tl.where(mask, (x - mean) * rstd, 0.0)
        if NEED_PARAMS:
            dgamma += dy * xhat
            dbeta += dy
        if NEED_DX:
            g = dy * gamma[None, :]
            along = tl.sum(g * xhat, 1)[:, None] / (N * 1.0)
            level = tl.sum(g, 1)[:, None] / (N * 1.0)
            dx = (g - level - xhat * along) * rstd
            tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if NEED_PARAMS:
        at = part.to(tl.int64) * N + col
        tl.store(partial_ptr + at, tl.sum(dgamma, 0), mask=live)
        tl.store(
            partial_ptr + at + PARTS * tl.full([], 1, tl.int64) * N, tl.sum(dbeta, 0), mask=live
        )


@triton.jit
def layer_norm_bwd_dx_looped(
    x_ptr, dy_ptr, gamma_ptr, mean_ptr, rstd_ptr, dx_ptr, N, HAS_GAMMA: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx as in `layer_norm_bwd_registers` for rows of any length, in two sweeps; float32."""
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * N
    dy_ptr += row * N
    dx_ptr += row * N
    mean = tl.load(mean_ptr + row)
    rstd = tl.load(rstd_ptr + row)
    col = tl.arange(0, BLOCK_C)
    along = tl.zeros([BLOCK_C], tl.float32)
    level = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, N, BLOCK_C):
        mask = start + col < N
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        if HAS_GAMMA:
            g *= tl.load(gamma_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        level += g
        along += tl.where(mask, g * (x - mean) * rstd, 0.0)
    mean_g = tl.sum(level, 0) / (N * 1.0)
    mean_gx = tl.sum(along, 0) / (N * 1.0)
    for start in range(0, N, BLOCK_C):
        mask = start + col < N
        x = tl.load(x_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        if HAS_GAMMA:
            g *= tl.load(gamma_ptr + start + col, mask=mask, other=0.0).to(tl.float32)
        dx = (g - mean_g - (x - mean) * rstd * mean_gx) * rstd
        tl.store(dx_ptr + start + col, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layer_norm_bwd_params_tiled(
    x_ptr, dy_ptr, mean_ptr, rstd_ptr, partial_ptr, R, N, PARTS, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """partial [2, PARTS, N] of dgamma = sum dy * xhat and dbeta = sum dy over rows, by column tiles; float32."""
    follow(PDL)
    part = tl.program_id(0) % PARTS
    col = (tl.program_id(0) // PARTS) * BLOCK_C + tl.arange(0, BLOCK_C)
    live = col < N
    dgamma = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    dbeta = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for tile in range(part, tl.cdiv(R, BLOCK_R), PARTS):
        row = tl.arange(0, BLOCK_R).to(tl.int64) + tile * BLOCK_R
        mask = (row < R)[:, None] & live[None, :]
        at = (row * N)[:, None] + col[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.load(mean_ptr + row, mask=row < R, other=0.0)[:, None]
        rstd = tl.load(rstd_ptr + row, mask=row < R, other=0.0)[:, None]
        dgamma += tl.where(mask, dy * (x - mean) * rstd, 0.0)
        dbeta += dy
    at = part.to(tl.int64) * N + col
    tl.store(partial_ptr + at, tl.sum(dgamma, 0), mask=live)
    tl.store(partial_ptr + at + PARTS * tl.full([], 1, tl.int64) * N, tl.sum(dbeta, 0), mask=live)


def layer_norm_configs(columns: int, dtype: str) -> list[dict[str, Any]]:
    """Forward configurations, best guess first; "looped" serves rows of any length."""
    block_c = triton.next_power_of_2(columns)
    held: list[dict[str, Any]] = []
    for elements, warps, each in ((2048, 4, 512), (1024, 4, 1024), (4096, 8, 256), (1024, 1, 1024)):
        warps = max(warps, min(32, block_c // each))  # `each`: elements of a long row per warp
        config = {
            "strategy": "registers",
            "BLOCK_R": max(1, elements // block_c),
            "BLOCK_C": block_c,
            "num_warps": warps,
        }
        if config not in held and block_c <= 32768:
            held.append(config)
    wide = 2 if dtype == "f32" else 1
    looped = [
        {"strategy": "looped", "BLOCK_C": block // wide, "num_warps": warps}
        for block, warps in ((4096, 8), (8192, 16), (2048, 4))
    ]
    return held + looped


def layer_norm_launcher(
    rows: int,
    columns: int,
    dtypes: tuple[str, str, str],
    config: dict[str, Any],
    device: torch.device,
    *,
    has_gamma: bool = True,
    has_beta: bool = True,
    has_y: bool = True,
    save: bool = True,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (x, gamma, beta, y, mean, rstd, eps) -> bool over contiguous x [rows, columns].

    `dtypes` are those of x, of gamma and beta, and of y; mean and rstd are float32 [rows]. `has_y=False` writes the
    statistics only. Tensors a flag leaves out may be any tensor.
    """
    held = config["strategy"] == "registers"
    x, parameter, y = dtypes
    return prepare(
        layer_norm_fwd_registers if held else layer_norm_fwd_looped,
        grid=(triton.cdiv(rows, config.get("BLOCK_R", 1)), 1, 1),
        pointers={"x_ptr": x, "gamma_ptr": parameter, "beta_ptr": parameter, "y_ptr": y, "mean_ptr": "f32", "rstd_ptr": "f32"},
        integers={"R": rows, "N": columns} if held else {"N": columns}, floats=("eps",),
        constexprs={
            "HAS_GAMMA": has_gamma, "HAS_BETA": has_beta, "HAS_Y": has_y, "SAVE": save,
            **{name: config[name] for name in ("BLOCK_R", "BLOCK_C") if name in config},
        },
        num_warps=config["num_warps"], num_stages=1, device=device, align=align,
    )  # fmt: skip


def layer_norm_backward_configs(
    rows: int, columns: int, dtype: str, multiprocessors: int = 132
) -> list[dict[str, Any]]:
    """Backward configurations, best guess first: "fused" reads x and dy once, "split" serves any length."""
    block_c = triton.next_power_of_2(columns)
    configs: list[dict[str, Any]] = []
    for elements, warps, per in ((2048, 4, 2), (1024, 4, 4), (4096, 8, 1), (2048, 4, 1)):
        block_r = max(1, min(elements // block_c, triton.next_power_of_2(rows)))
        parts = max(1, min(multiprocessors * per, -(-rows // block_r)))
        warps = max(warps, min(32, block_c // 512))
        config = {"strategy": "fused", "parts": parts, "BLOCK_R": block_r, "BLOCK_C": block_c}
        config["num_warps"] = warps
        if block_c <= 16384 and config not in configs:
            configs.append(config)
    tiles = -(-columns // 64)
    parts = max(1, min(-(-rows // 32), multiprocessors * 4 // tiles, 128))
    for block, warps in ((4096, 8), (2048, 4)):
        sizes = {"BLOCK_R": 32, "BLOCK_C": 64, "BLOCK": block, "num_warps": warps}
        configs.append({"strategy": "split", "parts": parts, **sizes})
    return configs


def layer_norm_backward_launcher(
    rows: int,
    columns: int,
    dtypes: tuple[str, str, str],
    config: dict[str, Any],
    device: torch.device,
    *,
    has_gamma: bool = True,
    need_dx: bool = True,
    need_params: bool = True,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (x, dy, gamma, mean, rstd, dx, dparams, partial) -> bool.

    `dtypes` are those of x, dy and dx; of gamma; of dparams [2, columns], which holds dgamma and dbeta. partial is
    float32 workspace of 2 * config["parts"] * columns elements.
    """
    x, parameter, out = dtypes
    parts = config["parts"]
    fused = config["strategy"] == "fused"
    sizes = {"R": rows, "N": columns, "PARTS": parts}
    shared: dict[str, Any] = {"num_stages": 1, "device": device, "align": align}
    steps: list[Callable[..., bool]] = []
    inputs = {"x_ptr": x, "dy_ptr": x}
    statistics = {"mean_ptr": "f32", "rstd_ptr": "f32"}
    if fused:
        steps.append(
            prepare(
                layer_norm_bwd_registers, grid=(parts, 1, 1),
                pointers={**inputs, "gamma_ptr": parameter, **statistics, "dx_ptr": x, "partial_ptr": "f32"},
                integers=sizes, floats=(),
                constexprs={"HAS_GAMMA": has_gamma, "NEED_DX": need_dx, "NEED_PARAMS": need_params,
                            "BLOCK_R": config["BLOCK_R"], "BLOCK_C": config["BLOCK_C"]},
                num_warps=config["num_warps"], **shared,
            )
        )  # fmt: skip
    else:
        looped = prepare(
            layer_norm_bwd_dx_looped, grid=(rows, 1, 1),
            pointers={**inputs, "gamma_ptr": parameter, **statistics, "dx_ptr": x},
            integers={"N": columns}, floats=(),
            constexprs={"HAS_GAMMA": has_gamma, "BLOCK_C": config["BLOCK"]},
            num_warps=config["num_warps"], **shared,
        )  # fmt: skip
        tiled = prepare(
            layer_norm_bwd_params_tiled, grid=(parts * triton.cdiv(columns, config["BLOCK_C"]), 1, 1),
            pointers={**inputs, **statistics, "partial_ptr": "f32"}, integers=sizes, floats=(),
            constexprs={"BLOCK_R": config["BLOCK_R"], "BLOCK_C": config["BLOCK_C"]},
            num_warps=4, **shared,
        )  # fmt: skip
        if need_dx:
            steps.append(lambda x, dy, g, mean, rstd, dx, partial: looped(x, dy, g, mean, rstd, dx))
        if need_params:
            steps.append(
                lambda x, dy, g, mean, rstd, dx, partial: tiled(x, dy, mean, rstd, partial)
            )
    if not need_params:
        return lambda x, dy, g, mean, rstd, dx, dparams, partial: steps[0](
            x, dy, g, mean, rstd, dx, partial
        )
    columns_config = {"strategy": "columns", "parts": 1, "last": False, "BLOCK_R": min(32, triton.next_power_of_2(parts)),
                      "BLOCK_C": 32, "num_warps": 4}  # fmt: skip
    gather = reduce_launcher("sum", "f32", out, 2, parts, columns, columns_config, device, align)

    def run(
        x: Any, dy: Any, g: Any, mean: Any, rstd: Any, dx: Any, dparams: Any, partial: Any
    ) -> bool:
        done = all(step(x, dy, g, mean, rstd, dx, partial) for step in steps)
        return done and gather(partial, dparams, partial, partial)

    return run
