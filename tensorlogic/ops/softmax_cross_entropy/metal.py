"""softmax_cross_entropy in Metal: one pass over each row's logits by a simdgroup or a group, the reduction in a second launch."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch import Tensor

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...core.key import Key
from ...kernels import register
from ...kernels.metal import register as metal_register
from ...kernels.metal.launch import launcher, written
from ...kernels.metal.shader_prelude import TYPES
from . import SOFTMAX_CROSS_ENTROPY, SOFTMAX_CROSS_ENTROPY_BACKWARD, shapes
from .shapes import Shape, describe

THREADS = 256
SHORT = 512  # classes up to which a simdgroup is enough for a row
MOST_ROWS = 1 << 15  # of groups along one axis of the grid

SOURCE = r"""
// the largest value m seen and the sum s of exp(v - m): two such pairs as one
inline float rescaled(float s, float m, float most) { return m == -INFINITY ? s : s * exp(m - most); }

// loss[row] = lse - (1 - smoothing) x[target] - smoothing mean(x), 0 where ignored; lse[row] = log sum exp x
[[max_total_threads_per_threadgroup(THREADS)]] kernel void cross_entropy_rows(
    device const T* x [[buffer(0)]], device const long* target [[buffer(1)]], device LOSS_T* loss [[buffer(2)]],
    device float* kept [[buffer(3)]], constant long* n [[buffer(4)]], constant float& smoothing [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float mosts[THREADS / 32];
  threadgroup float sums[THREADS / 32];
  threadgroup float totals[THREADS / 32];
  long rows = n[0], classes = n[1], ignored = n[2];
  long row = WIDE ? long(group.x) : long(group.x) * (THREADS / 32) + simd;
  bool live = row < rows;
  device const T* values = x + (live ? row : 0) * classes;
  // the mean is taken from the target's logit where that is a number, in powers of two that leave so many room
  long label = live ? target[row] : -1;
  bool known = label >= 0 && label < classes;
  float hit = known ? float(values[label]) : NAN;
  float scale = as_type<float>((251u - (as_type<uint>(float(classes)) >> 23)) << 23);
  float off = known && fabs(hit) < INFINITY ? hit * scale : 0.0f;
  float m = -INFINITY, s = 0.0f, total = 0.0f;
  for (long i = WIDE ? index : lane; live && i < classes; i += WIDE ? THREADS : 32) {
    float v = float(values[i]);
    total += v * scale - off;
    if (v > m) {
      s = rescaled(s, m, v) + 1.0f;
      m = v;
    } else if (v != -INFINITY) {
      s += exp(v - m);
    }
  }
  float most = simd_max(m);
  s = simd_sum(rescaled(s, m, most));
  total = simd_sum(total);
#if WIDE
  if (lane == 0) {
    mosts[simd] = most;
    sums[simd] = s;
    totals[simd] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (simd > 0) return;
  bool has = lane < THREADS / 32;
  m = has ? float(mosts[lane]) : -INFINITY;
  most = simd_max(m);
  s = simd_sum(has ? rescaled(sums[lane], m, most) : 0.0f);
  total = simd_sum(has ? float(totals[lane]) : 0.0f);
#endif
  if (!live || lane > 0) return;
  float ratio = log(s), lse = most + ratio, v = NAN;  // of large logits, lse is rounded by more than v may be off
  if (known && most != INFINITY)
    v = (1.0f - smoothing) * (most - hit + ratio)
        + (smoothing == 0.0f ? 0.0f : smoothing * ((most * scale - off - total / float(classes)) / scale + ratio));
  loss[row] = LOSS_T(label == ignored ? 0.0f : v);
  if (SAVE) kept[row] = label == ignored ? 0.0f : lse;
}

// y = the sum of the rows' losses, over the rows that count for a mean; share = the weight of a row in it
[[max_total_threads_per_threadgroup(THREADS)]] kernel void cross_entropy_finish(
    device const float* loss [[buffer(0)]], device const long* target [[buffer(1)]], device T* y [[buffer(2)]],
    device float* share [[buffer(3)]], constant long* n [[buffer(4)]],
    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float losses[THREADS / 32];
  threadgroup float counts[THREADS / 32];
  float total = 0.0f, count = 0.0f;
  for (long row = index; row < n[0]; row += THREADS) {
    total += loss[row];
    count += target[row] == n[2] ? 0.0f : 1.0f;
  }
  total = simd_sum(total);
  count = simd_sum(count);
  if (lane == 0) {
    losses[simd] = total;
    counts[simd] = count;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (index > 0) return;
  total = count = 0.0f;
  for (uint i = 0; i < THREADS / 32; i++) {
    total += losses[i];
    count += counts[i];
  }
  y[0] = T(MEAN ? total / count : total);
  if (SAVE) share[0] = MEAN ? 1.0f / count : 1.0f;
}

// dx = (softmax(x) - smoothed one-hot of the target) dloss share, 0 where ignored
[[max_total_threads_per_threadgroup(THREADS)]] kernel void cross_entropy_backward(
    device const DY_T* dy [[buffer(0)]], device const T* x [[buffer(1)]], device const long* target [[buffer(2)]],
    device const float* lse [[buffer(3)]], device const float* share [[buffer(4)]], device T* dx [[buffer(5)]],
    constant long* n [[buffer(6)]], constant float& smoothing [[buffer(7)]],
    uint3 at [[thread_position_in_grid]]) {
  long row = long(at.y) + long(at.z) * n[3], i = at.x, classes = n[1];
  if (row >= n[0] || i >= classes) return;
  long label = target[row];
  float p = exp(float(x[row * classes + i]) - lse[row]) - smoothing / float(classes);
  if (i == label) p -= 1.0f - smoothing;
  float v = p * float(dy[EACH_ROW ? row : 0]) * share[0];
  dx[row * classes + i] = T(label == n[2] ? 0.0f : v);
}
"""


def _defines(s: Shape, wide: bool) -> dict[str, Any]:
    return {
        "T": TYPES[s.dtype], "DY_T": TYPES[s.dy_dtype], "THREADS": THREADS, "WIDE": wide, "SAVE": s.save,
        "LOSS_T": TYPES[s.dtype] if s.reduction == "none" else "float",
        "MEAN": s.reduction == "mean", "EACH_ROW": s.reduction == "none",
    }  # fmt: skip


def configs(s: Shape) -> list[dict[str, Any]]:
    """A simdgroup a row, or a whole group."""
    ways = [{"wide": False}, {"wide": True}]
    return ways if s.columns <= SHORT else ways[::-1]


def build(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The forward launcher: (loss,) or (loss, log-sum-exp, share)."""
    wide = bool(config["wide"])
    source = written(_defines(s, wide), SOURCE)
    groups = s.rows if wide else math.ceil(s.rows / (THREADS // 32))
    rows = launcher(source, "cross_entropy_rows", (groups, 1, 1), (THREADS, 1, 1))
    finish = launcher(source, "cross_entropy_finish", (1, 1, 1), (THREADS, 1, 1))
    empty, dtype, each = register.empty(device), DTYPES[s.dtype], s.reduction == "none"
    shape = s.shape[:-1] if each else (s.rows,)
    stride, numbers = register.contiguous(shape), (s.rows, s.columns, s.ignore_index)
    save, smoothing = s.save, float(s.smoothing)

    def launch(x: Tensor, target: Tensor) -> Any:
        loss = empty(shape, stride, dtype if each else torch.float32)
        lse = empty((s.rows,), (1,), torch.float32) if save else loss
        rows(x, target, loss, lse, numbers, smoothing)
        if each:
            if not save:
                return (loss,)
            return loss, lse, torch.ones(1, dtype=torch.float32, device=device)
        y = empty((), (), dtype)
        share = empty((1,), (1,), torch.float32) if save else loss
        finish(loss, target, y, share, numbers)
        return (y, lse, share) if save else (y,)

    return launch


def kept(key: Key) -> Shape | str:
    """What backward sees; what forward kept must be float32."""
    for name in ("lse", "share"):
        t = key.spec(name)
        if t is None or t.dtype != "f32" or not register.is_contiguous(t):
            return f"{name} is not contiguous float32"
    return describe(key)


def build_backward(s: Shape, config: Config, device: torch.device) -> Launcher:
    """The backward launcher."""
    wide = min(THREADS, 1 << max(s.columns - 1, 0).bit_length())
    high = THREADS // wide
    groups = math.ceil(s.rows / high)
    grid = (math.ceil(s.columns / wide), min(groups, MOST_ROWS), math.ceil(groups / MOST_ROWS))
    source = written(_defines(s, False), SOURCE)
    start = launcher(source, "cross_entropy_backward", grid, (wide, high, 1))
    empty, dtype, stride = register.empty(device), DTYPES[s.dtype], register.contiguous(s.shape)
    numbers, smoothing = (s.rows, s.columns, s.ignore_index, grid[1] * high), float(s.smoothing)

    def launch(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor, share: Tensor) -> Any:
        dx = empty(s.shape, stride, dtype)
        start(dloss, logits, target, lse, share, dx, numbers, smoothing)
        return (dx,)

    return launch


_SOURCES = (shapes, sys.modules[__name__])
metal_register.described(SOFTMAX_CROSS_ENTROPY, "metal.rows", describe, configs, build, _SOURCES)
metal_register.described(
    SOFTMAX_CROSS_ENTROPY_BACKWARD, "metal.rows", kept, lambda s: ({},), build_backward, _SOURCES
)
