"""Matrix products in Metal: one kernel family with prologues and epilogues, by single elements, by tiles, by simdgroup matrices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.dtypes import DTYPES
from ..gemm.spec import GemmSpec, Operand
from .launch import MOST_BYTES, Start, launcher, written
from .shader_prelude import KINDS, TYPES

Config = Mapping[str, Any]
TENSORS = (
    "x", "w", "saved", "gamma", "beta", "bias", "mean", "var", "scale", "shift", "residual",
    "y", "z", "x_out", "row_sum",
)  # fmt: skip
STEP = 16  # columns of x that a tile holds at a time
CONFIGS: dict[str, tuple[dict[str, Any], ...]] = {
    "naive": ({"strategy": "naive"},),
    "tiled": ({"strategy": "tiled", "tile": 32}, {"strategy": "tiled", "tile": 16}),
    "simdgroup": ({"strategy": "simdgroup", "tile": 64}, {"strategy": "simdgroup", "tile": 32}),
}
_OUTER = {"none": 0, "residual": 1, "gradient": 2}
_PROLOGUE = {"none": 0, "activation": 1, "gradient": 2, "layer_norm": 3}

COMMON = r"""
// y[M, N] = act(outer(columnwise(prologue(x[M, K]) w[K, N] + bias))), sums in float32, any strides, every access checked
struct Product {
  device const T* x; device const T* w; device const T* saved;
  device const GAMMA_T* gamma; device const BETA_T* beta; device const BIAS_T* bias;
  device const MEAN_T* mean; device const VAR_T* var; device const SCALE_T* scale; device const SHIFT_T* shift;
  device const T* residual; device T* y; device T* z; device T* x_out;
  long M, N, K, x_row, x_column, w_row, w_column, s_row, s_column, r_row, r_column, y_row, y_column;
  float eps;

  // prologue(x)[m, k], 0 outside
  float left(long m, long k, float center, float spread) const {
    if (m >= M || k >= K) return 0.0f;
    float v = float(x[m * x_row + k * x_column]);
#if PROLOGUE == 1
    v = activate(v, KIND);
#elif PROLOGUE == 2
    v = activation_gradient(v, float(saved[m * s_row + k * s_column]), KIND);
#elif PROLOGUE == 3
    v = (v - center) * spread;
    if (GAMMA) v *= float(gamma[k]);
    if (BETA) v += float(beta[k]);
#endif
    return v;
  }
  // w[k, n], 0 outside
  T right(long k, long n) const {
    return k < K && n < N ? w[k * w_row + n * w_column] : T(0.0f);
  }
  // everything after the sum, where [m, n] exists
  void finish(long m, long n, float v) const {
    if (m >= M || n >= N) return;
    long at = m * y_row + n * y_column;
    if (BIAS) v += float(bias[n]);
#if Z && EARLY
    z[at] = T(v);
#endif
    if (MEAN) v -= float(mean[n]);
    if (VAR) v *= rsqrt(float(var[n]) + eps);
    if (SCALE) v *= float(scale[n]);
    if (SHIFT) v += float(shift[n]);
#if OUTER == 1
    v += float(residual[m * r_row + n * r_column]);
#elif OUTER == 2
    v = activation_gradient(v, float(residual[m * r_row + n * r_column]), KIND);
#endif
#if Z && !EARLY
    z[at] = T(v);
#endif
    y[at] = T(activate(v, ACTIVATION));
  }
};

inline Product product(
    device const T* x, device const T* w, device const T* saved, device const GAMMA_T* gamma,
    device const BETA_T* beta, device const BIAS_T* bias, device const MEAN_T* mean, device const VAR_T* var,
    device const SCALE_T* scale, device const SHIFT_T* shift, device const T* residual, device T* y,
    device T* z, device T* x_out, constant long* n, float eps, long batch) {
  Product p;
  p.M = n[0]; p.N = n[1]; p.K = n[2];
  p.x_row = n[3]; p.x_column = n[4]; p.w_row = n[6]; p.w_column = n[7];
  p.s_row = n[9]; p.s_column = n[10]; p.r_row = n[12]; p.r_column = n[13]; p.y_row = n[15]; p.y_column = n[16];
  p.x = x + batch * n[5]; p.w = w + batch * n[8]; p.saved = saved + batch * n[11];
  p.residual = residual + batch * n[14]; p.y = y + batch * n[17]; p.z = z + batch * n[17];
  p.x_out = x_out + batch * p.M * p.K;
  p.gamma = gamma; p.beta = beta; p.bias = bias; p.mean = mean; p.var = var; p.scale = scale; p.shift = shift;
  p.eps = eps;
  return p;
}

// mean and 1/std of `rows` rows of x from m0, each by one simdgroup at a time, in two passes
inline void row_statistics(
    thread const Product& p, long m0, uint rows, uint simd, uint simds, uint lane,
    threadgroup float* center, threadgroup float* spread) {
  for (uint r = simd; r < rows; r += simds) {
    long m = m0 + r;
    float total = 0.0f;
    for (long k = lane; m < p.M && k < p.K; k += 32) total += float(p.x[m * p.x_row + k * p.x_column]);
    float average = simd_sum(total) / float(p.K), square = 0.0f;
    for (long k = lane; m < p.M && k < p.K; k += 32) {
      float d = float(p.x[m * p.x_row + k * p.x_column]) - average;
      square += d * d;
    }
    square = simd_sum(square);
    if (lane == 0) {
      center[r] = average;
      spread[r] = rsqrt(square / float(p.K) + p.eps);
    }
  }
}
"""

# every kernel takes the same buffers; those that a product lacks are never touched
_BUFFERS = r"""
    device const T* x [[buffer(0)]], device const T* w [[buffer(1)]], device const T* saved [[buffer(2)]],
    device const GAMMA_T* gamma [[buffer(3)]], device const BETA_T* beta [[buffer(4)]],
    device const BIAS_T* bias [[buffer(5)]], device const MEAN_T* mean [[buffer(6)]],
    device const VAR_T* var [[buffer(7)]], device const SCALE_T* scale [[buffer(8)]],
    device const SHIFT_T* shift [[buffer(9)]], device const T* residual [[buffer(10)]],
    device T* y [[buffer(11)]], device T* z [[buffer(12)]], device T* x_out [[buffer(13)]],
    device T* row_sum [[buffer(14)]], constant long* n [[buffer(15)]], constant float& eps [[buffer(16)]],
    uint3 group [[threadgroup_position_in_grid]], uint3 at [[thread_position_in_threadgroup]],
    uint index [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
    uint simd [[simdgroup_index_in_threadgroup]]"""
_PRODUCT = r"""
  Product p = product(x, w, saved, gamma, beta, bias, mean, var, scale, shift, residual, y, z, x_out, n, eps, group.z);
"""
# one step of K into threadgroup memory; XS and WS are how a place in a tile is written
_LOAD = r"""
    for (uint i = index; i < TILE * STEP; i += THREADS) {
      uint r = X_ACROSS ? i / STEP : i % TILE, c = X_ACROSS ? i % STEP : i / TILE;
      float v = p.left(m0 + r, k0 + c, PROLOGUE == 3 ? center[r] : 0.0f, PROLOGUE == 3 ? spread[r] : 0.0f);
      XS(r, c) = LEFT_T(v);
#if X_OUT
      if (group.x == 0 && m0 + r < p.M && k0 + c < p.K) x_out_at[(m0 + r) * p.K + k0 + c] = T(v);
#endif
      uint a = W_DOWN ? i % STEP : i / TILE, b = W_DOWN ? i / STEP : i % TILE;
      WS(a, b) = RIGHT_T(p.right(k0 + a, n0 + b));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
#if ROW_SUM
    if (group.x == 0 && index < TILE)
      for (uint c = 0; c < STEP; c++) total += float(XS(index, c));
#endif
"""
_PREPARE = r"""
  threadgroup float center[TILE];
  threadgroup float spread[TILE];
  long m0 = long(group.y) * TILE, n0 = long(group.x) * TILE;
  float total = 0.0f;
  device T* x_out_at = p.x_out;
#if PROLOGUE == 3
  row_statistics(p, m0, TILE, simd, THREADS / 32, lane, center, spread);
  threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
"""
_ROW_SUM = r"""
#if ROW_SUM
  if (group.x == 0 && index < TILE && m0 + index < p.M) row_sum[m0 + index] = T(total);
#endif
"""

NAIVE = (
    r"""
// one thread an element of y, x and w from device memory: nothing to set up, best where caches hold both
[[max_total_threads_per_threadgroup(THREADS)]] kernel void gemm_naive("""
    + _BUFFERS
    + ") {"
    + _PRODUCT
    + r"""
  long m = long(group.y) * 16 + at.y, c = long(group.x) * 16 + at.x;
  if (m >= p.M || c >= p.N) return;
  float sum = 0.0f;
  for (long k = 0; k < p.K; k++) sum += p.left(m, k, 0.0f, 0.0f) * float(p.right(k, c));
  p.finish(m, c, sum);
}
"""
)
TILED = (
    r"""
#define LEFT_T float
#define RIGHT_T float
#define XS(r, c) xs[(r) * (STEP + 1) + (c)]
#define WS(r, c) ws[(r) * (TILE + 1) + (c)]
// a TILE x TILE block of y by 16 x 16 threads, each its EACH x EACH elements; an element read serves TILE of them
[[max_total_threads_per_threadgroup(THREADS)]] kernel void gemm_tiled("""
    + _BUFFERS
    + ") {"
    + _PRODUCT
    + _PREPARE
    + r"""
  threadgroup float xs[TILE * (STEP + 1)];
  threadgroup float ws[STEP * (TILE + 1)];
  float sum[EACH][EACH];
  for (uint i = 0; i < EACH; i++)
    for (uint j = 0; j < EACH; j++) sum[i][j] = 0.0f;
  for (long k0 = 0; k0 < p.K; k0 += STEP) {"""
    + _LOAD
    + r"""
    for (uint c = 0; c < STEP; c++)
      for (uint i = 0; i < EACH; i++)
        for (uint j = 0; j < EACH; j++) sum[i][j] += XS(at.y + i * 16, c) * WS(c, at.x + j * 16);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = 0; i < EACH; i++)
    for (uint j = 0; j < EACH; j++) p.finish(m0 + at.y + i * 16, n0 + at.x + j * 16, sum[i][j]);
"""
    + _ROW_SUM
    + "}\n"
)
SIMDGROUP = (
    r"""
#define LEFT_T T
#define RIGHT_T T
#define XS(r, c) xs[(r) * STEP + (c)]
#define WS(r, c) ws[(r) * TILE + (c)]
// a TILE x TILE block of y by four simdgroups, each a quarter of it as EACH x EACH matrices of 8 x 8, summed in float32
[[max_total_threads_per_threadgroup(THREADS)]] kernel void gemm_simdgroup("""
    + _BUFFERS
    + ") {"
    + _PRODUCT
    + _PREPARE
    + r"""
  threadgroup T xs[TILE * STEP];
  threadgroup T ws[STEP * TILE];
  threadgroup float ys[TILE * TILE];
  uint row = simd / 2 * (TILE / 2), column = simd % 2 * (TILE / 2);
  simdgroup_matrix<float, 8, 8> sum[EACH][EACH];
  for (uint i = 0; i < EACH; i++)
    for (uint j = 0; j < EACH; j++) sum[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (long k0 = 0; k0 < p.K; k0 += STEP) {"""
    + _LOAD
    + r"""
    for (uint c = 0; c < STEP; c += 8) {
      simdgroup_matrix<T, 8, 8> a[EACH], b;
      for (uint i = 0; i < EACH; i++) simdgroup_load(a[i], &XS(row + i * 8, c), STEP);
      for (uint j = 0; j < EACH; j++) {
        simdgroup_load(b, &WS(c, column + j * 8), TILE);
        for (uint i = 0; i < EACH; i++) simdgroup_multiply_accumulate(sum[i][j], a[i], b, sum[i][j]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (uint i = 0; i < EACH; i++)
    for (uint j = 0; j < EACH; j++) simdgroup_store(sum[i][j], &ys[(row + i * 8) * TILE + column + j * 8], TILE);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = index; i < TILE * TILE; i += THREADS) p.finish(m0 + i / TILE, n0 + i % TILE, ys[i]);
"""
    + _ROW_SUM
    + "}\n"
)
_STRATEGIES = {"naive": NAIVE, "tiled": TILED, "simdgroup": SIMDGROUP}


def refusal(spec: GemmSpec, strategy: str) -> str | None:
    """None, or why these kernels cannot serve a product."""
    operands = [o for o in (spec.x, spec.w, spec.saved, spec.residual, spec.y) if o is not None]
    dtypes = {o.dtype for o in operands} | {d for d in (spec.z, spec.x_out, spec.row_sum) if d}
    if len(dtypes) > 1 or not dtypes <= {"f16", "bf16", "f32"}:
        return f"matrices of {', '.join(sorted(dtypes))}: one of f16, bf16 and f32 is needed"
    vectors = {
        d
        for d in (spec.gamma, spec.beta, spec.bias, spec.mean, spec.var, spec.scale, spec.shift)
        if d
    }
    if not vectors <= {"f16", "bf16", "f32"}:
        return f"vectors of {', '.join(sorted(vectors))}: f16, bf16 and f32 are what Metal has"
    if spec.prologue not in _PROLOGUE or spec.outer not in _OUTER:
        return f"a prologue {spec.prologue} or outer {spec.outer}"
    if spec.prologue == "layer_norm" and (not spec.inline or spec.save_statistics):
        return "row statistics that are given or kept"
    if spec.prologue in ("activation", "gradient") and spec.outer == "gradient":
        return "two activations in one product"
    if strategy == "naive" and (spec.prologue == "layer_norm" or spec.x_out or spec.row_sum):
        return "rows that one thread would read for every element"
    if spec.batch != 1 and (spec.row_sum or spec.prologue == "layer_norm"):
        return "a batch with what belongs to one matrix"
    if max(spec.m, spec.n, spec.k) >= 2**31 or spec.batch >= 2**16:
        return "a side of 2**31 or more, or a batch of 2**16"
    return None


def source(spec: GemmSpec, config: Config) -> str:
    """The shader of a product: its options as definitions before the family's text."""
    strategy, tile = str(config["strategy"]), int(config.get("tile", 16))
    each = {"naive": 1, "tiled": tile // 16, "simdgroup": tile // 16}[strategy]
    vectors = {"gamma": spec.gamma, "beta": spec.beta, "bias": spec.bias, "mean": spec.mean,
               "var": spec.var, "scale": spec.scale, "shift": spec.shift}  # fmt: skip
    defines: dict[str, Any] = {
        "T": TYPES[spec.x.dtype], "TILE": tile, "STEP": STEP, "EACH": each,
        "THREADS": 128 if strategy == "simdgroup" else 256,
        "PROLOGUE": _PROLOGUE[spec.prologue], "OUTER": _OUTER[spec.outer], "KIND": KINDS[spec.kind],
        "ACTIVATION": KINDS[spec.activation], "Z": spec.z is not None, "EARLY": spec.early_z,
        "X_OUT": spec.x_out is not None, "ROW_SUM": spec.row_sum is not None,
        "X_ACROSS": spec.x.columns == 1, "W_DOWN": spec.w.columns != 1,
        **{name.upper(): dtype is not None for name, dtype in vectors.items()},
        **{f"{name.upper()}_T": TYPES[dtype or spec.x.dtype] for name, dtype in vectors.items()},
    }  # fmt: skip
    return written(defines, COMMON, _STRATEGIES[strategy])


def threadgroup_bytes(spec: GemmSpec, config: Config) -> int:
    """Threadgroup memory of one group."""
    tile, size = int(config.get("tile", 16)), DTYPES[spec.x.dtype].itemsize
    if config["strategy"] == "simdgroup":
        return 2 * tile * STEP * size + tile * tile * 4 + 8 * tile
    return 8 * tile + 4 * (tile * (STEP + 1) + STEP * (tile + 1))


def configs(spec: GemmSpec, strategy: str) -> list[dict[str, Any]]:
    """Configurations of a strategy that fit, largest tiles first unless most of one would lie outside y."""
    fits = [c for c in CONFIGS[strategy] if threadgroup_bytes(spec, c) <= MOST_BYTES]
    return sorted(
        fits, key=lambda c: 2 * min(spec.m, spec.n) <= c.get("tile", 16) and c.get("tile", 16) > 16
    )


def numbers(spec: GemmSpec) -> tuple[int, ...]:
    """Sizes and strides as the kernels read them."""
    none = Operand(spec.x.dtype, 0, 0)
    found = [spec.m, spec.n, spec.k]
    for o in (spec.x, spec.w, spec.saved or none, spec.residual or none, spec.y):
        found += [o.rows, o.columns, o.batch]
    return tuple(found)


def arguments(spec: GemmSpec) -> tuple[str, ...]:
    """Names of the tensors a launcher takes, in order; what the product lacks is not among them."""
    present = {"x": True, "w": True, "y": True} | {
        name: getattr(spec, name) is not None for name in TENSORS[2:] if name != "y"
    }
    return tuple(name for name in TENSORS if present[name])


def gemm_launcher(spec: GemmSpec, config: Config, device: torch.device, eps: float = 0.0) -> Start:
    """A callable over the tensors that `arguments` names; writes y (and z, x_out, row_sum). Raises CompileFailure."""
    strategy, tile = str(config["strategy"]), int(config.get("tile", 16))
    groups = (math.ceil(spec.n / tile), math.ceil(spec.m / tile), spec.batch)
    size = (128, 1, 1) if strategy == "simdgroup" else (16, 16, 1)
    start = launcher(source(spec, config), f"gemm_{strategy}", groups, size)
    places = _places(arguments(spec))
    sizes, eps = numbers(spec), float(eps)

    def run(*tensors: torch.Tensor) -> bool:
        return start(*[tensors[i] for i in places], sizes, eps)

    return run


def _places(given: Sequence[str]) -> tuple[int, ...]:
    """For each buffer of the kernels the tensor to bind: its own, or x where there is none."""
    return tuple(given.index(name) if name in given else 0 for name in TENSORS)
