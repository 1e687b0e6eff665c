"""What every Metal shader begins with: element types, activations and their gradients in float32, sums over a threadgroup."""

from __future__ import annotations

TYPES = {"f16": "half", "bf16": "bfloat", "f32": "float", "bool": "uchar"}
KINDS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
LANES = 32  # of a simdgroup, on every Apple GPU

# before any definition: Metal's own headers must not see ours
INCLUDES = """#include <metal_stdlib>
#include <metal_simdgroup_matrix>
using namespace metal;
"""
SOURCE = r"""
// erf(t) = 1 - exp(-t P(t)) for 0 <= t <= 4, absolute error below 1.5e-7; Metal has none
inline float erf_of(float x) {
  float t = fmin(fabs(x), 4.0f);
  float p = -8.043930392886978e-06f;
  p = fma(p, t, 1.060276263160631e-04f);
  p = fma(p, t, -5.879542441107333e-04f);
  p = fma(p, t, 1.5767669538035989e-03f);
  p = fma(p, t, -5.878871525055729e-05f);
  p = fma(p, t, -1.921713910996914e-02f);
  p = fma(p, t, 1.0279920697212219e-01f);
  p = fma(p, t, 6.366161108016968e-01f);
  p = fma(p, t, 1.1283793449401855f);
  return isnan(x) ? x : copysign(1.0f - exp(-t * p), x);
}

// exact at both infinities, no overflow
inline float tanh_of(float x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }

inline float gelu_tanh_inner(float x) { return 0.7978845608028654f * (x + 0.044715f * x * x * x); }

// NaN stays NaN
inline float activate(float x, int kind) {
  if (kind == 1) return x <= 0.0f ? 0.0f : x;
  if (kind == 2) return 0.5f * x * (1.0f + erf_of(x * 0.7071067811865476f));
  if (kind == 3) return 0.5f * x * (1.0f + tanh_of(gelu_tanh_inner(x)));
  if (kind == 4) return x / (1.0f + exp(-x));
  return x;
}

// dy act'(.), of the output for relu and of the pre-activation for the others
inline float activation_gradient(float dy, float saved, int kind) {
  if (kind == 1) return saved <= 0.0f ? 0.0f : dy;
  if (kind == 2) {
    float density = 0.3989422804014327f * exp(-0.5f * saved * saved);
    return dy * (0.5f * (1.0f + erf_of(saved * 0.7071067811865476f)) + saved * density);
  }
  if (kind == 3) {
    float t = tanh_of(gelu_tanh_inner(saved));
    float slope = 0.7978845608028654f * (1.0f + 0.134145f * saved * saved);
    return dy * (0.5f * (1.0f + t) + 0.5f * saved * (1.0f - t * t) * slope);
  }
  if (kind == 4) {
    float s = sigmoid(saved);
    return dy * s * (1.0f + saved * (1.0f - s));
  }
  return dy;
}

// the larger and the smaller of two, NaN if either is
inline float larger(float a, float b) { return (a > b || isnan(a)) ? a : b; }
inline float smaller(float a, float b) { return (a < b || isnan(a)) ? a : b; }
inline float simd_larger(float v) { return simd_any(isnan(v)) ? NAN : simd_max(v); }
inline float simd_smaller(float v) { return simd_any(isnan(v)) ? NAN : simd_min(v); }
"""
