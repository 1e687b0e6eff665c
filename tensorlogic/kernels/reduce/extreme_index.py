"""Extremes whose forward pass says where each line's extreme is, and their gradients: what backward reads of x are the lines in which several
elements are the extreme."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from tensorlogic.kernels.reduce.extreme_grad import (
    COMBINED,
    MOST_PARTS,
    NEVER,
    by_rows,
    extreme_configs,
    groups_of,
    of_lines,
    span_of,
    spread,
    stepped,
)
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


@triton.jit
def place_of(ties, at):
    """Where a line's only extreme is; -1 - ties where there are none (of NaN), or several."""
    return tl.where(ties == 1, at, -1 - ties)


@triton.jit
def joined(best, ties, at, LARGEST: tl.constexpr):
    """Of lines [n, BLOCK_I] in n shares the extreme, how often it is there, and where, if once; NaN is the extreme of its line, and never there."""
    lost = tl.max((best != best).to(tl.int32), 0)
    if LARGEST:
        whole = tl.max(tl.where(best != best, -float("inf"), best), 0)
    else:
        whole = tl.min(tl.where(best != best, float("inf"), best), 0)
    # no global: Triton finds one that is NaN changed
    whole = tl.where(lost != 0, float("nan"), whole)
    hit = best == whole[None, :]
    return whole, tl.sum(tl.where(hit, ties, 0), 0), tl.sum(tl.where(hit & (ties == 1), at, 0), 0)


@triton.jit
def extreme_fwd_placed(
    x_ptr, y_ptr, place_ptr, C, N, SPAN, PARTS, x_o, x_c, x_i,
    LARGEST: tl.constexpr, HELD: tl.constexpr, STEPPED: tl.constexpr, SHARED: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[o, i] = the extreme of x[o, :, i], NaN where any is, and its place: int32, see `place_of`. Of a line's SPAN elements number
    program_id(1) where it is SHARED: y (then float32) and places are those parts'. Lines that are HELD are one tile."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    x_ptr = from_start(begun(x_ptr, outer, first, x_o, x_i), begin, x_c)
    i, c = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_C)[:, None]
    live = first + i < N
    worst = -float("inf") if LARGEST else float("inf")
    if HELD:
        if STEPPED:
            x = stepped(x_ptr, within(x_i, x_c, WIDE, BLOCK_I, BLOCK_C), C, live, BLOCK_C)
        else:
            x = tile(x_ptr, x_at, 0, x_c, C, live, NEVER, "", BLOCK_C)
        there = c < C
        best = tl.where(there, x.to(tl.float32), worst)
        ties, at = there.to(tl.int32) + tl.zeros([BLOCK_C, BLOCK_I], tl.int32), c + tl.zeros([BLOCK_C, BLOCK_I], tl.int32)  # fmt: skip
    else:
        best = tl.full([BLOCK_C, BLOCK_I], worst, tl.float32)
        ties = tl.zeros([BLOCK_C, BLOCK_I], tl.int32)
        at = tl.zeros([BLOCK_C, BLOCK_I], tl.int32)
        x = tile(x_ptr, x_at, 0, x_c, length, live, NEVER, "evict_first", BLOCK_C)
        for start in range(0, length, BLOCK_C):
            after = tile(
                x_ptr, x_at, start + BLOCK_C, x_c, length, live, NEVER, "evict_first", BLOCK_C
            )
            there, v = c < length - start, x.to(tl.float32)
            # a NaN stays: nothing compares with it, and what came before does not matter any more
            first_seen = (v > best) if LARGEST else (v < best)
            first_seen = there & (first_seen | (v != v) | ((v == best) & (ties == 0)))
            ties = tl.where(first_seen, 1, ties + (there & (v == best)).to(tl.int32))
            at = tl.where(first_seen, (begin + start).to(tl.int32) + c, at)
            best = tl.where(first_seen, v, best)
            x = after
    whole, ties, at = joined(best, ties, at, LARGEST)
    if SHARED:
        lies = left_by(tl.program_id(1), PARTS, 1, BLOCK_I) + i
        tl.store(y_ptr + lies, whole)
        tl.store(place_ptr + lies, place_of(ties, at))
    else:
        lies = outer * N + first + i
        tl.store(y_ptr + lies, whole.to(y_ptr.dtype.element_ty), mask=live)
        tl.store(place_ptr + lies, place_of(ties, at), mask=live)


@triton.jit
def extreme_fwd_joined(
    best_ptr, part_ptr, y_ptr, place_ptr, N, PARTS,
    LARGEST: tl.constexpr, BLOCK_I: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y and places of lines from what `extreme_fwd_placed` left of their PARTS parts."""
    follow(PDL)
    tiles = tl.cdiv(N, BLOCK_I)
    outer, first = (tl.program_id(0) // tiles).to(tl.int64), (tl.program_id(0) % tiles) * BLOCK_I
    p, i = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK_I)
    worst = -float("inf") if LARGEST else float("inf")
    lies = left_by(0, PARTS, 1, BLOCK_I) + p * BLOCK_I + i[None, :]
    best = tl.load(best_ptr + lies, mask=p < PARTS, other=worst)
    place = tl.load(part_ptr + lies, mask=p < PARTS, other=-1)
    whole, ties, at = joined(best, tl.where(place < 0, -1 - place, 1), place, LARGEST)
    lies, live = outer * N + first + i, first + i < N
    tl.store(y_ptr + lies, whole.to(y_ptr.dtype.element_ty), mask=live)
    tl.store(place_ptr + lies, place_of(ties, at), mask=live)


@triton.jit
def extreme_bwd_placed(
    dy_ptr, x_ptr, y_ptr, place_ptr, dx_ptr, C, N, SPAN, x_o, x_c, x_i, dx_o, dx_c, dx_i,
    ROWS: tl.constexpr, HELD: tl.constexpr, STEPPED: tl.constexpr, WIDE: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_I: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx[o, :, i] = dy at the place, or dy / ties where x == y, else 0, of SPAN elements of BLOCK_I neighbouring lines. x is read of lines
    with several, or, where neighbours in memory are of several lines, if any of these has."""
    follow(PDL)
    outer, first, x_at = placed(N, x_c, x_i, WIDE, BLOCK_C, BLOCK_I)
    dx_at = within(dx_c, dx_i, WIDE, BLOCK_C, BLOCK_I)
    begin, length = part_of(C, SPAN)
    x_ptr = from_start(begun(x_ptr, outer, first, x_o, x_i), begin, x_c)
    dx_ptr = from_start(begun(dx_ptr, outer, first, dx_o, dx_i), begin, dx_c)
    i, c = tl.arange(0, BLOCK_I), tl.arange(0, BLOCK_C)[:, None]
    live = first + i < N
    place = tl.load(place_ptr + outer * N + first + i, mask=live, other=0)
    read = live & (place < 0) if ROWS else live & (tl.min(place, 0) < 0)
    ties = tl.where(place < 0, -1 - place, 1)
    y = of_lines(y_ptr, outer, first, N, live, BLOCK_I)
    dy = of_lines(dy_ptr, outer, first, N, live, BLOCK_I)
    if HELD:
        if STEPPED:
            x = stepped(x_ptr, within(x_i, x_c, WIDE, BLOCK_I, BLOCK_C), C, read, BLOCK_C)
        else:
            x = tile(x_ptr, x_at, 0, x_c, C, read, NEVER, "", BLOCK_C)
        dx = spread(tl.where(c == place[None, :], y, x.to(tl.float32)), y, dy, ties)
        tl.store(dx_ptr + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=inside(0, C, live, BLOCK_C))
    else:
        for start in range(0, length, BLOCK_C):
            x = tile(x_ptr, x_at, start, x_c, length, read, NEVER, "evict_first", BLOCK_C)
            only = (begin + start).to(tl.int32) + c == place[None, :]
            dx = spread(tl.where(only, y, x.to(tl.float32)), y, dy, ties)
            mask = inside(start, length, live, BLOCK_C)
            tl.store(from_start(dx_ptr, start, dx_c) + dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mask)  # fmt: skip


Config = dict[str, Any]


def placed_configs(lines: Lines, dtype: str, cores: int = 132) -> list[Config]:
    """Configurations, best guess first: those of the gradients alone, but that the compiler has as many registers as it likes."""
    found = [{**config, "registers": 0} for config in extreme_configs(lines, dtype, cores)]
    return [config for i, config in enumerate(found) if config not in found[:i]]


def placed_space(lines: Lines, config: Config) -> int:
    """Numbers that the parts of lines leave for a second launch; 0 where there is one."""
    if config["parts"] == 1:
        return 0
    block_i = int(config["BLOCK_I"])
    return groups_of(lines, block_i) * triton.cdiv(lines.length, span_of(lines, config)) * block_i


class Placed:
    """Kernels of lines of x, dx of `dtype`, for one configuration."""

    def __init__(
        self, lines: Lines, dtype: str, config: Config, device: torch.device, align: int = 16
    ) -> None:
        block_c, block_i = config["BLOCK_C"], config["BLOCK_I"]
        self.lines, self.dtype, self.config, self.device, self.align = lines, dtype, config, device, align  # fmt: skip
        self.span = span_of(lines, config)
        self.parts = triton.cdiv(lines.length, self.span)
        self.held = lines.length <= block_c
        fits = config["strategy"] != "held" or self.held
        fits = fits and self.parts <= MOST_PARTS and self.parts * block_i <= COMBINED
        fits = fits and lines.length + block_c < 2**31
        fitting(fits, "extreme", config, f"lines of {lines.length}")
        apart = block_i > 1 and by_rows(lines) and lines.strides[0][1] != 1
        self.shape = {"WIDE": lines.wide(block_c, block_i), "BLOCK_C": block_c, "BLOCK_I": block_i}
        self.shape |= {"HELD": self.held, "STEPPED": self.held and apart, "ROWS": by_rows(lines)}

    def forward(self, largest: bool) -> Callable[..., bool]:
        """A callable (x, best, part, y, place) -> bool: y of x's dtype and place, int32, are contiguous [outer, inner]; best, float32, and
        part, int32, have `placed_space` numbers, or are anything where that is 0."""
        shared = self.parts > 1
        known = {**self.shape, "LARGEST": largest, "SHARED": shared}
        y = "f32" if shared else self.dtype
        start = self._prepared(extreme_fwd_placed, {"x": self.dtype, "y": y, "place": "i32"}, known, self.parts)  # fmt: skip
        if not shared:
            return lambda x, best, part, y, place: start(x, y, place)
        known = {"LARGEST": largest, "BLOCK_I": self.shape["BLOCK_I"]}
        known["PADDED"] = triton.next_power_of_2(self.parts)
        pointers = {"best": "f32", "part": "i32", "y": self.dtype, "place": "i32"}
        join = self._prepared(extreme_fwd_joined, pointers, known, 1)
        return lambda x, best, part, y, place: start(x, best, part) and join(best, part, y, place)

    def backward(self) -> Callable[..., bool]:
        """A callable (dy, x, y, place, dx) -> bool; dy, y and place contiguous [outer, inner]."""
        pointers = dict.fromkeys(("dy", "x", "y", "dx"), self.dtype)
        return self._prepared(extreme_bwd_placed, {**pointers, "place": "i32"}, self.shape, self.parts)  # fmt: skip

    def _prepared(
        self, kernel: Any, pointers: dict[str, str], known: dict[str, Any], parts: int
    ) -> Callable[..., bool]:
        lines = self.lines
        sizes = {"C": lines.length, "N": lines.inner, "SPAN": self.span, "PARTS": self.parts}
        sizes |= lines.named(("x", "dx"))
        names = kernel.arg_names
        held = kernel is not extreme_fwd_joined
        return prepare(
            kernel,
            grid=(groups_of(lines, self.shape["BLOCK_I"]), parts, 1),
            pointers={f"{n[:-4]}_ptr": pointers[n[:-4]] for n in names if n.endswith("_ptr")},
            integers={name: n for name, n in sizes.items() if name in names},
            constexprs={name: value for name, value in known.items() if name in names},
            num_warps=self.config["num_warps"] if held else 4,
            registers=self.config.get("registers", 0) if held else 0,
            device=self.device,
            align=self.align,
        )
