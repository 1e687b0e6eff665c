"""attention_scores in Metal: a simdgroup a row of scores, computed twice and written once, keys shared by eight rows."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from ...core.candidate import Config, Launcher
from ...core.dtypes import DTYPES
from ...kernels import register
from ...kernels.metal import register as metal_register
from ...kernels.metal.launch import launcher, written
from ...kernels.metal.shader_prelude import TYPES
from . import ATTENTION_SCORES, shapes
from .shapes import Shape, describe

ROWS = 8  # simdgroups of a group, each with one row of q
# keys, and elements of each, that threadgroup memory holds at a time
STEP = 32

SOURCE = r"""
// y[b, h, s, t] = softmax over t of scale q[b, h, s, :] . k[b, h, t, :] + mask[b, h, s, t]
[[max_total_threads_per_threadgroup(ROWS * 32)]] kernel void scores(
    device const T* q [[buffer(0)]], device const T* k [[buffer(1)]], device const MASK_T* mask [[buffer(2)]],
    device T* y [[buffer(3)]], constant long* n [[buffer(4)]], constant float& scale [[buffer(5)]],
    uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
  threadgroup float qs[ROWS * DEPTH];
  threadgroup float ks[32 * 33];
  long H = n[1], S = n[2], L = n[3], D = n[4], b = long(group.y) / H, h = long(group.y) % H;
  long s0 = long(group.x) * ROWS, s = s0 + simd;
  device const T* q_at = q + b * n[5] + h * n[6];
  device const T* k_at = k + b * n[8] + h * n[9];
  device const MASK_T* mask_at = mask + b * n[11] + h * n[12] + s * n[13];
  for (uint i = index; i < ROWS * DEPTH; i += ROWS * 32) {
    long row = s0 + i / DEPTH, d = i % DEPTH;
    qs[i] = row < S && d < D ? float(q_at[row * n[7] + d]) : 0.0f;
  }
  float m = -INFINITY, sum = 0.0f, most = 0.0f, whole = 0.0f;
  long end = CAUSAL ? min(L, s0 + ROWS) : L;  // columns that some row of the group may see
  for (uint pass = 0; pass < 2; pass++) {
    for (long t0 = 0; t0 < (pass == 0 ? end : L); t0 += 32) {
      float score = 0.0f;
      for (long d0 = 0; d0 < D && t0 < end; d0 += 32) {
        for (uint i = index; i < 32 * 32; i += ROWS * 32) {
          long t = t0 + i / 32, d = d0 + i % 32;
          ks[i / 32 * 33 + i % 32] = t < L && d < D ? float(k_at[t * n[10] + d]) : 0.0f;
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint d = 0; d < 32; d++) score += qs[simd * DEPTH + d0 + d] * ks[lane * 33 + d];
        threadgroup_barrier(mem_flags::mem_threadgroup);
      }
      long t = t0 + lane;
      bool inside = s < S && t < L;
      score = score * scale;
      if (CAUSAL && t > s) score = -INFINITY;
#if MASK == 1
      if (inside && mask_at[t * n[14]] == 0) score = -INFINITY;
#elif MASK == 2
      if (inside) score += float(mask_at[t * n[14]]);
#endif
      if (!inside) continue;
      if (pass == 1) {
        y[((b * H + h) * S + s) * L + t] = T(exp(score - most) / whole);
      } else if (score > m) {
        sum = (m == -INFINITY ? 0.0f : sum * exp(m - score)) + 1.0f;
        m = score;
      } else if (score != -INFINITY) {
        sum += exp(score - m);
      }
    }
    if (pass == 0) {  // a row that sees nothing: exp(-inf + inf) is NaN, as in PyTorch
      most = simd_max(m);
      whole = simd_sum(m == -INFINITY ? sum : sum * exp(m - most));
    }
  }
}
"""


def served(key: Any) -> Shape | str:
    """What the kernel sees, unless a mask is of a dtype that Metal lacks."""
    found = describe(key)
    if not isinstance(found, str) and found.mask_dtype not in TYPES:
        return f"a mask of {found.mask_dtype}"
    return found


def build(x: Shape, config: Config, device: torch.device) -> Launcher:
    """The launcher over (q, k, scale, mask)."""
    b, h, s, _, d = x.sizes
    defines = {
        "T": TYPES[x.dtype], "MASK_T": TYPES[x.mask_dtype], "ROWS": ROWS, "CAUSAL": x.causal,
        "DEPTH": math.ceil(d / STEP) * STEP, "MASK": {"none": 0, "bool": 1, "float": 2}[x.mask],
    }  # fmt: skip
    grid = (math.ceil(s / ROWS), b * h, 1)
    start = launcher(written(defines, SOURCE), "scores", grid, (ROWS * STEP, 1, 1))
    numbers = (*x.sizes, *x.q, *x.k, *x.mask_strides)
    empty, stride, dtype = register.empty(device), register.contiguous(x.out), DTYPES[x.dtype]

    def launch(q: torch.Tensor, k: torch.Tensor, scale: float, mask: torch.Tensor | None) -> Any:
        y = empty(x.out, stride, dtype)
        start(q, k, q if mask is None else mask, y, numbers, float(scale))
        return (y,)

    return launch


metal_register.described(
    ATTENTION_SCORES, "metal.scores", served, lambda x: ({},), build, (shapes, sys.modules[__name__])
)  # fmt: skip
