"""Softmax cross-entropy over [rows, vocabulary] with class targets: forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.contiguous import row_body, row_ends, row_statistics, with_ends
from tensorlogic.kernels.softmax.rows import row_configs
from tensorlogic.kernels.triton_runtime.device_math import follow, powers
from tensorlogic.kernels.triton_runtime.launch import prepare


@triton.jit
def sum_losses(loss_ptr, R, BLOCK: tl.constexpr):
    """Sum of loss[:R] in fixed order, past the L1 cache: other programs have just written it."""
    lane = tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, R, BLOCK):
        acc += tl.load(
            loss_ptr + start + lane, mask=start + lane < R, other=0.0, cache_modifier=".cg"
        )
    return tl.sum(acc, 0)


@triton.jit
def write_loss(y_ptr, share_ptr, total, valid, MEAN: tl.constexpr, SAVE: tl.constexpr):
    """y = total, or its mean over `valid` rows (NaN when there are none); share = the gradient's factor."""
    share = 1.0
    if MEAN:
        share = 1.0 / valid.to(tl.float32)
        total = total / valid.to(tl.float32)
    tl.store(y_ptr, total.to(y_ptr.dtype.element_ty))
    if SAVE:
        tl.store(share_ptr, share)


@triton.jit
def whole_share(share_ptr):
    """share = 1: each row's gradient is its own, unless a second launch says otherwise."""
    if tl.program_id(0) == 0:
        tl.store(share_ptr, 1.0)


@triton.jit
def arrive_and_reduce(
    loss_ptr, y_ptr, share_ptr, counter_ptr, valid, R, MEAN: tl.constexpr, SAVE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The program that arrives last sums all losses; the 64-bit counter carries arrivals low, valid rows high."""
    tl.debug_barrier()
    before = tl.atomic_add(counter_ptr, (valid.to(tl.int64) << 32) + 1, sem="acq_rel")
    if (before & 0xFFFFFFFF) == tl.num_programs(0) - 1:
        total = sum_losses(loss_ptr, R, BLOCK)
        write_loss(y_ptr, share_ptr, total, (before >> 32) + valid, MEAN, SAVE)
        tl.store(counter_ptr, tl.full([], 0, tl.int64))


@triton.jit
def logit_gradient(x, lse, rest, hit, live, scale, smoothing, C, SMOOTH: tl.constexpr):
    """scale * (2**-rest exp(x - lse) - target distribution), 0 where the row is ignored; `hit` says where its target is."""
    d = tl.exp2((x.to(tl.float32) - lse) * 1.4426950408889634 - rest)
    if SMOOTH:
        d -= smoothing / (C * 1.0)
        d = tl.where(hit, d - (1.0 - smoothing), d)
    else:
        d = tl.where(hit, d - 1.0, d)
    return tl.where(live, d * scale, 0.0)


@triton.jit
def mean_frame(x_t, C, SMOOTH: tl.constexpr):
    """(scale, off) in which the mean of x * scale - off is taken: from the target's logit where that is a number, in
    powers of two that leave C of them room, so that no large logits cancel and rows of the largest overflow nowhere."""
    scale, off = 1.0, x_t
    if SMOOTH:
        exponent = tl.full([], C * 1.0, tl.float32).to(tl.int32, bitcast=True) >> 23
        scale = ((251 - exponent) << 23).to(tl.float32, bitcast=True)  # an eighth of 1 / C at most
        off = tl.where(tl.abs(x_t) < float("inf"), x_t, 0.0) * scale
    return scale, off


@triton.jit
def smoothed(loss, smoothing, peak, log, total, scale, off, C):
    """(1 - s) loss + s (lse - mean x) from the sum of x * scale - off."""
    above = ((peak * scale - off) - total / (C * 1.0)) / scale
    return (1.0 - smoothing) * loss + smoothing * (above + log)


@triton.jit
def cross_entropy_fwd_online(
    x_ptr, t_ptr, loss_ptr, lse_ptr, y_ptr, share_ptr, counter_ptr,
    R, C, IGNORE, smoothing,
    SMOOTH: tl.constexpr, SAVE: tl.constexpr, LAST: tl.constexpr, MEAN: tl.constexpr,
    EVEN: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, WIDTH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """loss[r] = (1 - s) (lse - x[r, t]) + s (lse - mean x[r]), one program a row, one online read; float32.

    Ignored rows are 0 and are not read; a target outside [0, C) gives NaN. Without EVEN rows start at any element: what
    whole aligned groups of WIDTH cover is read as such, the ends apart (4096x50257 in float16 on an H200, element by
    element: 0.20 of the reachable bandwidth). With LAST the last program reduces all losses.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    here = x_ptr + row * C
    t = tl.load(t_ptr + row)
    known = (t >= 0) & (t < C)
    live = t != IGNORE
    loss = tl.full([], 0.0, tl.float32)
    lse = tl.full([], 0.0, tl.float32)
    if live:
        x_t = tl.load(here + t, mask=known, other=float("nan")).to(tl.float32)
        scale, off = mean_frame(x_t, C, SMOOTH)
        if EVEN:
            peak, norm, total = row_statistics(here, C, SMOOTH, LANES, WIDTH, scale, off)
        else:
            front, length = row_body(row, C, WIDTH)
            ends, _, inside = row_ends(here, C, front, length, WIDTH)
            body = x_ptr + tl.multiple_of(row * C + front, WIDTH)
            peak, norm, total = row_statistics(body, length, SMOOTH, LANES, WIDTH, scale, off)
            peak, norm, total = with_ends(peak, norm, total, ends, inside, scale, off)
        log = tl.log(norm)
        lse = peak + log
        # of large logits, lse is rounded by more than the loss may be off
        loss = (peak - x_t) + log
        if SMOOTH:
            loss = smoothed(loss, smoothing, peak, log, total, scale, off, C)
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty))
    if SAVE:
        tl.store(lse_ptr + row, lse)
        if not LAST:
            whole_share(share_ptr)
    if LAST:
        valid = live.to(tl.int32)
        arrive_and_reduce(loss_ptr, y_ptr, share_ptr, counter_ptr, valid, R, MEAN, SAVE, BLOCK)


@triton.jit
def cross_entropy_fwd_registers(
    x_ptr, t_ptr, loss_ptr, lse_ptr, y_ptr, share_ptr, counter_ptr,
    R, C, IGNORE, smoothing,
    SMOOTH: tl.constexpr, SAVE: tl.constexpr, LAST: tl.constexpr, MEAN: tl.constexpr,
    SKIP: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `cross_entropy_fwd_online` with BLOCK_R rows held in registers; ONE program, of all rows, needs no other to arrive.

    Without SKIP ignored rows are read, too, so that all is asked for at once: see `SPARED`.
    """
    follow(PDL)
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    col = tl.arange(0, BLOCK_C)
    t = tl.load(t_ptr + row, mask=row < R, other=IGNORE)
    live = (t != IGNORE) & (row < R)
    known = (t >= 0) & (t < C)
    wanted = live if SKIP else row < R
    mask = wanted[:, None] & (col < C)[None, :]
    at = (row * C)[:, None] + col[None, :]
    x = tl.load(x_ptr + at, mask=mask, other=float("-inf")).to(tl.float32)
    x_t = tl.load(x_ptr + row * C + t, mask=live & known, other=float("nan")).to(tl.float32)
    peak = tl.where(live, tl.max(x, 1), 0.0)
    norm = tl.sum(powers(x - tl.where(peak == float("-inf"), 0.0, peak)[:, None]), 1)
    log = tl.log(norm)
    if SAVE:
        tl.store(lse_ptr + row, tl.where(live, peak + log, 0.0), mask=row < R)
        if not LAST:
            whole_share(share_ptr)
    loss = (peak - x_t) + log
    if SMOOTH:
        scale, off = mean_frame(x_t, C, SMOOTH)
        total = tl.sum(tl.where(mask, x * scale - off[:, None], 0.0), 1)
        loss = smoothed(loss, smoothing, peak, log, total, scale, off, C)
    loss = tl.where(live, loss, 0.0)
    tl.store(loss_ptr + row, loss.to(loss_ptr.dtype.element_ty), mask=row < R)
    if LAST:
        valid = tl.sum(live.to(tl.int32), 0)
        if ONE:
            write_loss(y_ptr, share_ptr, tl.sum(loss, 0), valid, MEAN, SAVE)
        else:
            arrive_and_reduce(loss_ptr, y_ptr, share_ptr, counter_ptr, valid, R, MEAN, SAVE, BLOCK)


@triton.jit
def cross_entropy_reduce(
    loss_ptr, t_ptr, y_ptr, share_ptr, R, IGNORE,
    MEAN: tl.constexpr, SAVE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y = sum or mean of loss over rows that count; share = the gradient's factor: 1, or one over those rows.

    One program, fixed order.
    """
    follow(PDL)
    lane = tl.arange(0, BLOCK)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in range(0, R, BLOCK):
        t = tl.load(t_ptr + start + lane, mask=start + lane < R, other=IGNORE)
        counted += (t != IGNORE).to(tl.int32)
    valid = tl.sum(counted, 0)
    write_loss(y_ptr, share_ptr, sum_losses(loss_ptr, R, BLOCK), valid, MEAN, SAVE)


@triton.jit
def rounded_off(
    x_ptr, row, lse, live, R, C, LARGE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """log2 of sum(exp(x[row] - lse)): 0 but for the rounding of lse, which is as large as lse is; 0 unless one is larger than LARGE."""
    rest = tl.zeros([BLOCK_R], tl.float32)
    if tl.max(tl.abs(lse), 0) > LARGE:
        total = tl.zeros([BLOCK_R], tl.float32)
        for start in range(0, C, BLOCK_C):
            col = start + tl.arange(0, BLOCK_C)
            inside = (live & (row < R))[:, None] & (col < C)[None, :]
            x = tl.load(x_ptr + (row * C)[:, None] + col[None, :], mask=inside, other=float("-inf"))
            total += tl.sum(powers(x.to(tl.float32) - lse[:, None]), 1)
        rest = tl.where(live, tl.log2(total), 0.0)
    return rest


@triton.jit
def cross_entropy_bwd_tiled(
    x_ptr, t_ptr, lse_ptr, dy_ptr, share_ptr, dx_ptr, R, C, IGNORE, smoothing,
    PER_ROW: tl.constexpr, SMOOTH: tl.constexpr, EVEN: tl.constexpr, SKIP: tl.constexpr, WIDTH: tl.constexpr, LARGE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx[r, c] = dy * share * (exp(x - lse[r]) - target distribution), one read and one write; float32.

    Without EVEN, tiles are one row high and cover its body in whole aligned groups; the first one takes the ends, too.
    Where lse is larger than LARGE, so that its rounding shows in exp(x - lse), a row is summed once more. SKIP as in forward.
    """
    follow(PDL)
    tiles_c = tl.cdiv(C, BLOCK_C)
    first = (tl.program_id(0) // tiles_c).to(tl.int64) * BLOCK_R
    tile = tl.program_id(0) % tiles_c
    row = first + tl.arange(0, BLOCK_R)
    t = tl.load(t_ptr + row, mask=row < R, other=IGNORE)
    lse = tl.load(lse_ptr + row, mask=row < R, other=0.0)
    live = t != IGNORE
    if PER_ROW:
        scale = tl.load(dy_ptr + row, mask=row < R, other=0.0).to(tl.float32)
    else:
        scale = tl.full([BLOCK_R], 1.0, tl.float32)
        scale *= tl.load(dy_ptr).to(tl.float32) * tl.load(share_ptr)
    scale = tl.where((t >= 0) & (t < C), scale, float("nan"))
    if SKIP:
        rest = rounded_off(x_ptr, row, lse, live, R, C, LARGE, BLOCK_R, BLOCK_C)
    lane = tile * BLOCK_C + tl.arange(0, BLOCK_C)
    if EVEN:
        col = lane
        inside = (row < R)[:, None] & (lane < C)[None, :]
        at = (row * C)[:, None] + col[None, :]
    else:
        start, length = row_body(first, C, WIDTH)
        col = start + lane
        inside = (lane < length)[None, :]
        at = tl.multiple_of(first * C + start, WIDTH) + lane[None, :]
    wanted = inside & live[:, None] if SKIP else inside
    x = tl.load(x_ptr + at, mask=wanted, other=0.0, eviction_policy="evict_first")
    if not SKIP:
        rest = rounded_off(x_ptr, row, lse, live, R, C, LARGE, BLOCK_R, BLOCK_C)
    hit = col[None, :] == t[:, None]
    d = logit_gradient(
        x, lse[:, None], rest[:, None], hit, live[:, None], scale[:, None], smoothing, C, SMOOTH
    )
    tl.store(dx_ptr + at, d.to(dx_ptr.dtype.element_ty), mask=inside)
    if not EVEN:  # noqa: SIM102  (a constant: what follows compiles only then)
        if tile == 0:
            v, place, some = row_ends(x_ptr + first * C, C, start, length, WIDTH)
            found = place[None, :] == t[:, None]
            g = logit_gradient(
                v[None, :],
                lse[:, None],
                rest[:, None],
                found,
                live[:, None],
                scale[:, None],
                smoothing,
                C,
                SMOOTH,
            )
            to = dx_ptr + first * C + place[None, :]
            tl.store(to, g.to(dx_ptr.dtype.element_ty), mask=some[None, :])


# bytes of logits from which ignored rows are not read, so that whether they are has to be known
# before they are asked for
SPARED = 1 << 22
# |lse| up to which its rounding, 2**-24 of it, does not show
LARGE = {"f32": 64.0, "f16": 4096.0, "bf16": 4096.0}


def cross_entropy_configs(columns: int, dtype: str) -> list[dict[str, Any]]:
    """Forward configurations, best guess first; `last` reduces in the same launch, otherwise a second one does."""
    configs = [{**config, "last": True} for config in row_configs(columns, dtype)]
    return [*configs[:6], *({**config, "last": False} for config in configs[:2])]


def cross_entropy_launcher(
    rows: int,
    columns: int,
    dtype: str,
    loss_dtype: str,
    reduction: str,
    ignore_index: int,
    config: dict[str, Any],
    device: torch.device,
    *,
    smooth: bool = False,
    save: bool = False,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (x, t, loss, lse, y, share, counter, smoothing) -> bool; unused tensors may be any.

    x is contiguous [rows, columns], t int64 [rows]. `reduction` "none": loss [rows] of `loss_dtype` is the result.
    "mean" or "sum": loss is float32 workspace [rows], y (one element of `loss_dtype`) the result, counter one
    int64 that is zero before the first call and left so. With `save`, lse [rows] and share [1] (both float32) are
    what `cross_entropy_backward_launcher` takes.
    """
    held = config["strategy"] == "registers"
    last = config["last"] and reduction != "none"
    names = ("BLOCK_R", "BLOCK_C", "LANES", "WIDTH")
    blocks: dict[str, int] = {name: config[name] for name in names if name in config}
    start = prepare(
        cross_entropy_fwd_registers if held else cross_entropy_fwd_online,
        grid=(triton.cdiv(rows, config.get("BLOCK_R", 1)), 1, 1),
        pointers={
            "x_ptr": dtype,
            "t_ptr": "i64",
            "loss_ptr": loss_dtype if reduction == "none" else "f32",
            "lse_ptr": "f32",
            "y_ptr": loss_dtype,
            "share_ptr": "f32",
            "counter_ptr": "i64",
        },
        integers={"R": rows, "C": columns, "IGNORE": ignore_index},
        floats=("smoothing",),
        constexprs={
            "SMOOTH": smooth,
            "SAVE": save,
            "LAST": last,
            "MEAN": reduction == "mean",
            **(
                {"SKIP": rows * columns * SIZES[dtype] >= SPARED, "ONE": rows <= config["BLOCK_R"]}
                if held
                else {"EVEN": columns % config["WIDTH"] == 0}
            ),
            "BLOCK": 32 * min(32, config["num_warps"] * 8),
            **blocks,
        },
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )
    if reduction == "none" or last:
        return start
    second = total_launcher(rows, loss_dtype, reduction, ignore_index, device, save, align)

    def both(
        x: Any, t: Any, loss: Any, lse: Any, y: Any, share: Any, counter: Any, s: float
    ) -> bool:
        return start(x, t, loss, lse, y, share, counter, s) and second(loss, t, y, share)

    return both


def total_launcher(
    rows: int, dtype: str, reduction: str, ignore_index: int, device: torch.device, save: bool, align: int = 16
) -> Callable[..., bool]:  # fmt: skip
    """A callable (loss, t, y, share) -> bool: y, of `dtype`, is the sum or mean of the losses of all rows."""
    return prepare(
        cross_entropy_reduce,
        grid=(1, 1, 1),
        pointers={"loss_ptr": "f32", "t_ptr": "i64", "y_ptr": dtype, "share_ptr": "f32"},
        integers={"R": rows, "IGNORE": ignore_index},
        constexprs={"MEAN": reduction == "mean", "SAVE": save, "BLOCK": 4096},
        num_warps=8,
        device=device,
        align=align,
    )


def cross_entropy_backward_configs(columns: int, dtype: str) -> list[dict[str, Any]]:
    """Configurations of the backward pass, best guess first."""
    wide = 2 if dtype == "f32" else 1
    block_c = triton.next_power_of_2(columns)
    return [
        {"BLOCK_C": (c := min(block_c, most // wide)), "BLOCK_R": max(1, size // wide // c), "num_warps": warps}
        for most, size, warps in (
            (2048, 2048, 4), (1024, 1024, 4), (4096, 4096, 4), (8192, 8192, 8), (2048, 2048, 8), (1024, 1024, 1)
        )
    ]  # fmt: skip


def cross_entropy_backward_launcher(
    rows: int,
    columns: int,
    dtype: str,
    dy_dtype: str,
    reduction: str,
    ignore_index: int,
    config: dict[str, Any],
    device: torch.device,
    *,
    smooth: bool = False,
    align: int = 16,
) -> Callable[..., bool]:
    """A callable (x, t, lse, dy, share, dx, smoothing) -> bool; dy is [rows] for "none", else one element."""
    tiles = triton.cdiv(rows, config["BLOCK_R"]) * triton.cdiv(columns, config["BLOCK_C"])
    width = 4 if dtype == "f32" else 8
    return prepare(
        cross_entropy_bwd_tiled,
        grid=(tiles, 1, 1),
        pointers={
            "x_ptr": dtype,
            "t_ptr": "i64",
            "lse_ptr": "f32",
            "dy_ptr": dy_dtype,
            "share_ptr": "f32",
            "dx_ptr": dtype,
        },
        integers={"R": rows, "C": columns, "IGNORE": ignore_index},
        floats=("smoothing",),
        constexprs={
            "PER_ROW": reduction == "none",
            "SMOOTH": smooth,
            "EVEN": columns % width == 0 or config["BLOCK_R"] > 1,
            "SKIP": rows * columns * SIZES[dtype] >= SPARED,
            "WIDTH": width,
            "LARGE": LARGE[dtype],
            "BLOCK_R": config["BLOCK_R"],
            "BLOCK_C": config["BLOCK_C"],
        },
        num_warps=config["num_warps"],
        device=device,
        align=align,
    )
