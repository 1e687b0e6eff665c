"""Gradients of extremes over lines of [outer, C, inner]: elements that are the extreme share what comes in. A line is held in registers,
swept twice, or shared by several programs in two launches; same bits every run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.core.key import SIZES
from tensorlogic.kernels.row_access.strided import (
    Lines,
    begun,
    from_start,
    inside,
    left_by,
    part_of,
    placed,
    tile,
    within,
)
from tensorlogic.kernels.triton_runtime.config_check import fitting
from tensorlogic.kernels.triton_runtime.device_math import follow
from tensorlogic.kernels.triton_runtime.launch import prepare

NEVER = tl.constexpr(float("nan"))  # what stands beyond a line: no extreme equals it


@triton.jit
def of_lines(ptr, outer, first, N, live, BLOCK_I: tl.constexpr):
    """What contiguous [outer, N] holds of this program's lines, [1, BLOCK_I]; float32."""
    at = outer * N + first + tl.arange(0, BLOCK_I)
    return tl.load(ptr + at, mask=live, other=0.0).to(tl.float32)[None, :]


@triton.jit
def spread(x, y, dy, ties):
    """dy / ties where x is y, else 0 times that, as PyTorch's product with a truth: NaN where nothing is the extreme."""
    share = tl.div_rn(dy, ties[None, :].to(tl.float32))
    return tl.where(x.to(tl.float32) == y, share, share * 0.0)


@triton.jit
def stepped(ptr, at, C, live, BLOCK_C: tl.constexpr):
    """Lines whose elements lie steps apart, [BLOCK_C, BLOCK_I] of `at` [BLOCK_I, BLOCK_C], the order in which threads follow a line: in the
    other one, where no step is known to be 1, they go from line to line, a sector of memory each."""
    mask = live[:, None] & (tl.arange(0, BLOCK_C) < C)[None, :]
    return tl.trans(tl.load(ptr + at, mask=mask, other=NEVER))


@triton.jit
def extreme_bwd_held(
    dy_ptr, x_ptr, y_ptr, dx_ptr, C, N, x_o, x_c, x_i, dx_o, dx_c, dx_i,
    STEPPED: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx[o, :, i] = dy / ties where x == y, else 0, of BLOCK_I neighbouring lines that are read once; ties counted in int32."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    dx_at = within(dx_c, dx_i, WIDE, BLOCK_C, BLOCK_I)
    live = first + tl.arange(0, BLOCK_I) < N
    x_ptr = begun(x_ptr, outer, first, x_o, x_i)
    if STEPPED:
        x = stepped(x_ptr, within(x_i, x_c, WIDE, BLOCK_I, BLOCK_C), C, live, BLOCK_C)
    else:
        x = tile(x_ptr, x_at, 0, x_c, C, live, NEVER, "", BLOCK_C)
    y = of_lines(y_ptr, outer, first, N, live, BLOCK_I)
    dy = of_lines(dy_ptr, outer, first, N, live, BLOCK_I)
    ties = tl.sum((x.to(tl.float32) == y).to(tl.int32), 0)
    dx = spread(x, y, dy, ties).to(dx_ptr.dtype.element_ty)
    tl.store(begun(dx_ptr, outer, first, dx_o, dx_i) + dx_at, dx, mask=inside(0, C, live, BLOCK_C))


@triton.jit
def ties_of(x_ptr, x_at, y, x_c, length, live, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr):
    """How many of the `length` elements from x_ptr on are their line's y, [BLOCK_I]. A tile is asked for before the one in front of it
    is used."""
    hits = tl.zeros([BLOCK_C, BLOCK_I], tl.int32)
    x = tile(x_ptr, x_at, 0, x_c, length, live, NEVER, "evict_last", BLOCK_C)
    for start in range(0, length, BLOCK_C):
        after = tile(x_ptr, x_at, start + BLOCK_C, x_c, length, live, NEVER, "evict_last", BLOCK_C)
        hits += (x.to(tl.float32) == y).to(tl.int32)
        x = after
    return tl.sum(hits, 0)


@triton.jit
def extreme_bwd_twice(
    dy_ptr, x_ptr, y_ptr, dx_ptr, C, N, x_o, x_c, x_i, dx_o, dx_c, dx_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `extreme_bwd_held` for lines of any length, read twice: to count, then, from L2, to write."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    dx_at = within(dx_c, dx_i, WIDE, BLOCK_C, BLOCK_I)
    x_ptr, dx_ptr = begun(x_ptr, outer, first, x_o, x_i), begun(dx_ptr, outer, first, dx_o, dx_i)
    live = first + tl.arange(0, BLOCK_I) < N
    y = of_lines(y_ptr, outer, first, N, live, BLOCK_I)
    dy = of_lines(dy_ptr, outer, first, N, live, BLOCK_I)
    ties = ties_of(x_ptr, x_at, y, x_c, C, live, BLOCK_C, BLOCK_I)
    x = tile(x_ptr, x_at, 0, x_c, C, live, NEVER, "evict_first", BLOCK_C)
    for start in range(0, C, BLOCK_C):
        after = tile(x_ptr, x_at, start + BLOCK_C, x_c, C, live, NEVER, "evict_first", BLOCK_C)
        dx = spread(x, y, dy, ties).to(dx_ptr.dtype.element_ty)
        mask = inside(start, C, live, BLOCK_C)
        tl.store(from_start(dx_ptr, start, dx_c) + dx_at, dx, mask=mask)
        x = after


@triton.jit
def extreme_bwd_counted(
    x_ptr, y_ptr, count_ptr, C, N, SPAN, PARTS, x_o, x_c, x_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """count[lines, p] = how many of the p-th SPAN elements of BLOCK_I neighbouring lines are their line's y; int32."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    x_ptr = from_start(begun(x_ptr, outer, first, x_o, x_i), begin, x_c)
    i = tl.arange(0, BLOCK_I)
    live = first + i < N
    y = of_lines(y_ptr, outer, first, N, live, BLOCK_I)
    ties = ties_of(x_ptr, x_at, y, x_c, length, live, BLOCK_C, BLOCK_I)
    tl.store(count_ptr + left_by(tl.program_id(1), PARTS, 1, BLOCK_I) + i, ties)


@triton.jit
def extreme_bwd_shared(
    dy_ptr, x_ptr, y_ptr, count_ptr, dx_ptr, C, N, SPAN, PARTS, x_o, x_c, x_i, dx_o, dx_c, dx_i,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx of the same elements, ties from what `extreme_bwd_counted` left of their lines' PARTS parts; x comes from L2."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    dx_at = within(dx_c, dx_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    x_ptr = from_start(begun(x_ptr, outer, first, x_o, x_i), begin, x_c)
    dx_ptr = from_start(begun(dx_ptr, outer, first, dx_o, dx_i), begin, dx_c)
    p, i = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK_I)
    live = first + i < N
    x = tile(x_ptr, x_at, 0, x_c, length, live, NEVER, "evict_first", BLOCK_C)
    y = of_lines(y_ptr, outer, first, N, live, BLOCK_I)
    dy = of_lines(dy_ptr, outer, first, N, live, BLOCK_I)
    lies = count_ptr + left_by(0, PARTS, 1, BLOCK_I) + p * BLOCK_I + i[None, :]
    ties = tl.sum(tl.load(lies, mask=p < PARTS, other=0), 0)
    for start in range(0, length, BLOCK_C):
        after = tile(x_ptr, x_at, start + BLOCK_C, x_c, length, live, NEVER, "evict_first", BLOCK_C)
        dx = spread(x, y, dy, ties).to(dx_ptr.dtype.element_ty)
        mask = inside(start, length, live, BLOCK_C)
        tl.store(from_start(dx_ptr, start, dx_c) + dx_at, dx, mask=mask)
        x = after


WHOLE = 65536  # bytes of the lines that a program holds
SECTOR = 32  # bytes that memory is read by
MOST_PARTS = 512  # of a line: every program adds up all of its lines' parts
COMBINED = 4096  # parts times neighbouring lines at most
MOST_CONFIGS = 7
HELD = ((8192, 4), (4096, 4), (16384, 8), (2048, 1))  # bytes of a tile of whole rows, warps
# of columns: bytes of a tile at least, warps at least; bytes of neighbours at least, of a thread at most while warps suffice
HELD_COLUMNS = ((8192, 4, 128, 64), (16384, 8, 256, 128), (8192, 4, 128, 128), (4096, 4, 64, 128), (2048, 1, 32, 64))  # fmt: skip
MOST_WARPS = 16
# elements of columns a thread, for which the registers below do: left alone, the compiler keeps all
# offsets, too
MOST_HELD = 32
REGISTERS = {True: 64, False: 72}  # of a thread where a program has 8 warps or more, and fewer
# bytes of a tile and warps; then programs a multiprocessor; bytes of neighbouring lines before them
ROWS = ((8192, 4, 4), (16384, 8, 2), (4096, 4, 4))
COLUMNS = ((128, 8192, 8, 2), (64, 4096, 4, 4), (128, 8192, 4, 4), (256, 16384, 8, 1))
Config = dict[str, Any]


def by_rows(lines: Lines) -> bool:
    """Whether neighbours in dx's memory are of one line; x lies so, too, unless it repeats itself."""
    _, along, across = lines.strides[1]
    return lines.inner == 1 or along <= across


def groups_of(lines: Lines, block_i: int) -> int:
    return lines.outer * triton.cdiv(lines.inner, block_i)


def _tile(strategy: str, block_c: int, block_i: int, warps: int, parts: int = 1) -> Config:
    """A configuration, of no more warps than have four elements a thread."""
    warps = min(warps, max(1, block_c * block_i // 128))
    return {"strategy": strategy, "BLOCK_C": block_c, "BLOCK_I": block_i, "parts": parts, "num_warps": warps}  # fmt: skip


def _held(lines: Lines, size: int, cores: int) -> list[Config]:
    """Whole lines, so many at once that programs are many and large."""
    block_c, most = triton.next_power_of_2(lines.length), triton.next_power_of_2(lines.inner)
    if not by_rows(lines):
        return _held_columns(lines, size, cores)
    found = []
    for nbytes, warps in HELD:
        block_i = max(1, min(nbytes // size // block_c, most))
        while block_i > 1 and groups_of(lines, block_i) < 2 * cores:
            block_i //= 2
        held = block_c * block_i * size
        if held <= WHOLE:
            found.append(_tile("held", block_c, block_i, min(MOST_WARPS, max(warps, held // 2048))))
    return found


def _held_columns(lines: Lines, size: int, cores: int) -> list[Config]:
    """Whole columns, so many neighbours at once that accesses are wide, in few registers, so that programs wait for memory in turns."""
    block_c, most = triton.next_power_of_2(lines.length), triton.next_power_of_2(lines.inner)
    least, room = min(SECTOR // size, most), 32 * MOST_WARPS * MOST_HELD
    found = []
    for nbytes, few, wide, each in HELD_COLUMNS:
        block_i = min(max(nbytes // block_c, wide) // size, most)
        while block_i > least and (
            block_c * block_i > room or groups_of(lines, block_i) < 2 * cores
        ):
            block_i //= 2
        count = block_c * block_i
        if count * size <= WHOLE:
            fit = max(few, count * size // (32 * each), count // (32 * MOST_HELD))
            config = _tile("held", block_c, block_i, min(MOST_WARPS, fit))
            if count <= room:
                config["registers"] = REGISTERS[config["num_warps"] >= 8]
            found.append(config)
    return found


def _swept(lines: Lines, size: int, cores: int) -> tuple[list[Config], list[Config]]:
    """Tiles that go over lines twice: one program a line, or several."""
    rows, most = by_rows(lines), triton.next_power_of_2(lines.inner)
    twice, parts = [], []
    for wide, nbytes, warps, programs in [(0, *row) for row in ROWS] if rows else COLUMNS:
        block_i = 1 if rows else min(wide // size, most)
        block_c = min(nbytes // size // block_i, triton.next_power_of_2(lines.length))
        if block_c < lines.length:
            twice.append(_tile("twice", block_c, block_i, nbytes // 1024))
        groups = groups_of(lines, block_i)
        least = max(1, 128 * warps // block_i)
        while block_c > least and groups * triton.cdiv(lines.length, block_c) < 2 * cores:
            block_c //= 2
        tiles = triton.cdiv(lines.length, block_c)
        room = min(cores * programs // groups, MOST_PARTS, COMBINED // block_i, tiles)
        if room > 1:
            shared = triton.cdiv(tiles, triton.cdiv(tiles, room))
            parts.append(_tile("parts", block_c, block_i, warps, shared))
    return twice, parts


def extreme_configs(lines: Lines, dtype: str, cores: int = 132) -> list[Config]:
    """Configurations, best guess first: lines held where they are many or all is small, else shared or swept twice."""
    size = SIZES[dtype]
    held = _held(lines, size, cores)
    twice, parts = _swept(lines, size, cores)
    many = groups_of(lines, 1 if by_rows(lines) else COLUMNS[0][0] // size) >= cores
    small = lines.outer * lines.length * lines.inner * size <= WHOLE
    order = held + twice[:2] + parts[:2]
    if not many and not (small and held):
        idle = parts and twice and 8 * groups_of(lines, twice[0]["BLOCK_I"]) < cores
        order = parts + held[:2] + ([] if idle else twice[:1])
    elif many and not held:
        order = twice[:3] + parts
    return [config for i, config in enumerate(order) if config not in order[:i]][:MOST_CONFIGS]


def span_of(lines: Lines, config: Config) -> int:
    """Elements of a part, in whole tiles."""
    block = int(config["BLOCK_C"])
    return triton.cdiv(triton.cdiv(lines.length, config["parts"]), block) * block


def extreme_space(lines: Lines, config: Config) -> int:
    """Int32 numbers that a first launch leaves for the second; 0 where there is one."""
    if config["strategy"] != "parts":
        return 0
    block_i = int(config["BLOCK_I"])
    return groups_of(lines, block_i) * triton.cdiv(lines.length, span_of(lines, config)) * block_i


def extreme_launcher(
    lines: Lines, dtype: str, config: Config, device: torch.device, align: int = 16
) -> Callable[..., bool]:
    """A callable (dy, x, y, count, dx) -> bool. dy and y are contiguous [outer, inner]; x and dx lie as the two strides of `lines` say; all of
    `dtype` but count, which is `extreme_space` int32 numbers, or anything where that is 0."""
    strategy, block_c, block_i = config["strategy"], config["BLOCK_C"], config["BLOCK_I"]
    span = span_of(lines, config)
    parts = triton.cdiv(lines.length, span)
    fits = strategy != "held" or lines.length <= block_c
    fits = fits and (strategy != "parts" or (parts <= MOST_PARTS and parts * block_i <= COMBINED))
    fits = fits and lines.length + block_c < 2**31
    fitting(fits, "extreme", config, f"lines of {lines.length}")
    sizes = {"C": lines.length, "N": lines.inner, "SPAN": span, "PARTS": parts}
    sizes |= lines.named(("x", "dx"))

    def launch(kernel: Any, names: list[str], **more: int) -> Callable[..., bool]:
        return prepare(
            kernel,
            grid=(groups_of(lines, block_i), parts if strategy == "parts" else 1, 1),
            pointers={f"{name}_ptr": "i32" if name == "count" else dtype for name in names},
            integers={name: n for name, n in sizes.items() if name in kernel.arg_names},
            constexprs={
                "WIDE": lines.wide(block_c, block_i),
                "BLOCK_C": block_c,
                "BLOCK_I": block_i,
                **more,
            },
            num_warps=config["num_warps"],
            registers=config.get("registers", 0),
            device=device,
            align=align,
        )

    if strategy != "parts":
        names = ["dy", "x", "y", "dx"]
        apart = block_i > 1 and by_rows(lines) and lines.strides[0][1] != 1
        held = strategy == "held"
        alone = launch(extreme_bwd_held, names, STEPPED=apart) if held else launch(extreme_bwd_twice, names)  # fmt: skip
        return lambda dy, x, y, count, dx: alone(dy, x, y, dx)
    leave = launch(extreme_bwd_counted, ["x", "y", "count"])
    padded = triton.next_power_of_2(parts)
    write = launch(extreme_bwd_shared, ["dy", "x", "y", "count", "dx"], PADDED=padded)
    return lambda dy, x, y, count, dx: leave(x, y, count) and write(dy, x, y, count, dx)
