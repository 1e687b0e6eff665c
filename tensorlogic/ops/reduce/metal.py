"""Reductions in Metal: lanes of a simdgroup first, simdgroups next, and for few long ones a second launch over parts."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.metal import register as metal_register
from ...kernels.metal.launch import Start, launcher, written
from ...kernels.metal.shader_prelude import TYPES
from . import FAMILY, shapes
from .shapes import Shape, describe

KINDS = {"sum": 0, "mean": 1, "max": 2, "min": 3}
THREADS = 256
LONG = 4096  # elements from which a second stage may pay
PARTS = 64

SOURCE = r"""
inline float start_value() { return KIND < 2 ? 0.0f : KIND == 2 ? -INFINITY : INFINITY; }
inline float both(float a, float b) { return KIND < 2 ? a + b : KIND == 2 ? larger(a, b) : smaller(a, b); }
inline float across(float v) { return KIND < 2 ? simd_sum(v) : KIND == 2 ? simd_larger(v) : simd_smaller(v); }

// y[outer, part] over x[outer, reduce]: one simdgroup a row, or with WIDE all eight of a group
[[max_total_threads_per_threadgroup(THREADS)]] kernel void reduce_rows(
    device const IN* x [[buffer(0)]], device OUT* y [[buffer(1)]], constant long* n [[buffer(2)]],
    constant float& scale [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float partial[THREADS / 32];
  long outer = n[0], reduce = n[1], parts = n[3], size = n[4];
  long row = WIDE ? long(group.x) : long(group.x) * (THREADS / 32) + simd;
  bool live = row < outer * parts;
  long begin = row % parts * size, end = live ? min(begin + size, reduce) : 0;
  float v = start_value();
  for (long i = begin + (WIDE ? index : lane); i < end; i += WIDE ? THREADS : 32)
    v = both(v, float(x[row / parts * reduce + i]));
  v = across(v);
#if WIDE
  if (lane == 0) partial[simd] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd == 0) v = across(lane < THREADS / 32 ? float(partial[lane]) : start_value());
#endif
  if (live && lane == 0 && (!WIDE || simd == 0)) y[row] = OUT(v * scale);
}

// y[outer, part, inner] over x[outer, reduce, inner]: neighbouring threads read neighbouring columns
[[max_total_threads_per_threadgroup(THREADS)]] kernel void reduce_columns(
    device const IN* x [[buffer(0)]], device OUT* y [[buffer(1)]], constant long* n [[buffer(2)]],
    constant float& scale [[buffer(3)]], uint3 group [[threadgroup_position_in_grid]],
    uint3 at [[thread_position_in_threadgroup]]) {
  threadgroup float partial[THREADS];
  long reduce = n[1], inner = n[2], parts = n[3], size = n[4];
  long column = long(group.x) * 32 + at.x, row = long(group.y) + long(group.z) * n[5];
  bool live = row < n[0] * parts && column < inner;
  long begin = row % parts * size, end = live ? min(begin + size, reduce) : 0;
  float v = start_value();
  for (long r = begin + at.y; r < end; r += THREADS / 32)
    v = both(v, float(x[(row / parts * reduce + r) * inner + column]));
  partial[at.y * 32 + at.x] = v;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (at.y > 0 || !live) return;
  for (uint i = 1; i < THREADS / 32; i++) v = both(v, float(partial[i * 32 + at.x]));
  y[row * inner + column] = OUT(v * scale);
}
"""
MOST_GROUPS = 1 << 15  # along the second axis of the grid


def configs(s: Shape) -> list[dict[str, Any]]:
    """A simdgroup or a whole group for each row, in one stage or in two where few rows are long."""
    ways: list[dict[str, Any]] = [{"wide": True}, {"wide": False}]
    if s.inner > 1:
        ways = [{"wide": False}]
    elif s.reduce <= 256:
        ways.reverse()
    ways = [{**way, "parts": 1} for way in ways]
    if s.reduce >= LONG and s.outer * math.ceil(s.inner / 32) <= PARTS:
        ways.insert(0, {"wide": s.inner == 1, "parts": PARTS})
    return ways


def stage(
    kind: str, given: str, made: str, sizes: tuple[int, int, int], parts: int, wide: bool, scale: float
) -> Start:  # fmt: skip
    """A callable (x, y): [outer, reduce, inner] to [outer, parts, inner], times `scale`."""
    outer, reduce, inner = sizes
    each = math.ceil(reduce / parts)
    defines = {
        "IN": TYPES[given], "OUT": TYPES[made], "KIND": KINDS[kind], "THREADS": THREADS, "WIDE": wide,
    }  # fmt: skip
    rows = outer * parts
    if inner == 1:
        groups = (rows if wide else math.ceil(rows / (THREADS // 32)), 1, 1)
        start = launcher(written(defines, SOURCE), "reduce_rows", groups, (THREADS, 1, 1))
    else:
        high = min(rows, MOST_GROUPS)
        groups = (math.ceil(inner / 32), high, math.ceil(rows / high))
        start = launcher(written(defines, SOURCE), "reduce_columns", groups, (32, THREADS // 32, 1))
    numbers = (outer, reduce, inner, parts, each, groups[1])
    return lambda x, y: start(x, y, numbers, scale)


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """A launcher; two stages meet in float32."""
    empty, stride, dtype = register.empty(device), register.contiguous(s.out), DTYPES[s.dtype]
    parts, wide = int(config["parts"]), bool(config["wide"])
    scale = 1.0 / s.reduce if s.kind == "mean" else 1.0
    if parts == 1:
        only = stage(s.kind, s.dtype, s.dtype, (s.outer, s.reduce, s.inner), 1, wide, scale)

        def launch(x: torch.Tensor) -> Any:
            y = empty(s.out, stride, dtype)
            only(x, y)
            return (y,)

        return launch
    first = stage(s.kind, s.dtype, "f32", (s.outer, s.reduce, s.inner), parts, wide, 1.0)
    second = stage(s.kind, "f32", s.dtype, (s.outer, parts, s.inner), 1, False, scale)
    count = s.outer * parts * s.inner

    def launch_two(x: torch.Tensor) -> Any:
        partial, y = empty((count,), (1,), torch.float32), empty(s.out, stride, dtype)
        first(x, partial)
        second(partial, y)
        return (y,)

    return launch_two


for _op in FAMILY:
    metal_register.described(
        _op, "metal.simdgroup", describe, configs, build, (shapes, sys.modules[__name__])
    )
