// AVX2, FMA and F16C: 8 float32 lanes; tails go through a small buffer.
#pragma once

#include <immintrin.h>
#include <string.h>

#include "kernels.h"

namespace tensorlogic::avx2 {

constexpr int W = 8;
using vf = __m256;
typedef int32_t vi __attribute__((vector_size(32)));

constexpr int MR = 6;         // rows of a product's tile: with two vectors a row, 12 of 16 registers
constexpr int64_t KC = 384;  // depth of its panels
constexpr bool cheap_lookup = false;  // in registers
constexpr bool bf16_in_pairs = false;

struct All {};
struct Some {  // the first n lanes, 0 < n < W
  int64_t n;
};

INLINE vi lane_numbers() { return vi{0, 1, 2, 3, 4, 5, 6, 7}; }
INLINE vf set1(float x) { return _mm256_set1_ps(x); }
INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
INLINE vf fnma(vf a, vf b, vf c) { return _mm256_fnmadd_ps(a, b, c); }  // c - a * b
INLINE vf product_error(vf a, vf b, vf p) {
  return _mm256_fmsub_ps(a, b, p);
}                                                           // a * b - p, exact where p = a * b
INLINE vf vmax(vf a, vf b) { return _mm256_max_ps(a, b); }  // b where either is NaN
INLINE vf vmin(vf a, vf b) { return _mm256_min_ps(a, b); }
INLINE vf nearest(vf x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vf vabs(vf x) { return _mm256_andnot_ps(set1(-0.0f), x); }
INLINE vf size_up_to(float most, vf x) { return vmin(vabs(x), set1(most)); }
INLINE vf pow2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// x * 2^n, n integral, below 250; x * 0 where n < least. In two steps, for what is too large for one
INLINE vf scale2(vf x, vf n, float least = LEAST_EXPONENT) {
  const vf normal = _mm256_cmp_ps(n, set1(least), _CMP_NLT_UQ);  // NaN stays
  const __m256i i = _mm256_cvtps_epi32(vmax(set1(least), n)), half = _mm256_srai_epi32(i, 1);
  return x * _mm256_and_ps(normal, pow2(half)) * pow2(_mm256_sub_epi32(i, half));
}
// The same of x from 0.5 to 2 with n up to 126: the exponent's bits are added to
INLINE vf scale2_near_one(vf x, vf n, float least = LEAST_EXPONENT) {
  const vf normal = _mm256_cmp_ps(n, set1(least), _CMP_NLT_UQ);
  const __m256i risen = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);  // of NaN nothing
  return _mm256_and_ps(normal, _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), risen)));
}
INLINE vf reciprocal(vf x) { return set1(1.0f) / x; }
INLINE vf reciprocal_coarse(vf x) {
  vf r = _mm256_rcp_ps(x);
  return r * fnma(x, r, set1(2.0f));
}
INLINE vf lookup(const float (&table)[32], vi index) {  // table[index mod 32]
  return _mm256_i32gather_ps(table, reinterpret_cast<__m256i>(index & 31), 4);
}
INLINE vf lookup(const float (&table)[8], vi index) {  // table[index mod 8], which a register holds
  return _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), reinterpret_cast<__m256i>(index));
}
template <int N>  // for levels with cheap look-ups, as what follows
INLINE bool any_below(const vf*, float) {
  return true;
}
INLINE vf where_below(vf x, float limit, vf v, vf otherwise) { return x < set1(limit) ? v : otherwise; }
template <int N, class Value>
INLINE void where_far(const vf (&)[N], vf (&)[N], float, float, Value) {}
typedef uint32_t vu __attribute__((vector_size(32)));
// High and low words of m * a
INLINE void multiply(uint32_t m, vu a, vu& high, vu& low) {
  const __m256i v = reinterpret_cast<__m256i>(a), by = _mm256_set1_epi64x(m);
  const __m256i even = _mm256_mul_epu32(v, by),
                odd = _mm256_mul_epu32(_mm256_srli_epi64(v, 32), by);
  high = reinterpret_cast<vu>(_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa));
  low = reinterpret_cast<vu>(_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa));
}
// Lane i takes lane i ^ by.
INLINE vf turned(vf v, int by) {
  return _mm256_permutevar8x32_ps(v, reinterpret_cast<__m256i>(lane_numbers() ^ by));
}
// p[lane * step]
INLINE vf strided(const float* p, int64_t step) {
  const vi at = lane_numbers() * static_cast<int32_t>(step);
  return _mm256_i32gather_ps(p, reinterpret_cast<__m256i>(at), 4);
}
using vd = __m256d;
INLINE vd fma(vd a, vd b, vd c) { return _mm256_fmadd_pd(a, b, c); }
INLINE vd vmax(vd a, vd b) { return _mm256_max_pd(a, b); }
INLINE vd vabs(vd x) { return _mm256_andnot_pd(_mm256_set1_pd(-0.0), x); }
INLINE void doubles(vf v, vd (&to)[2]) {
  to[0] = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
  to[1] = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
}
INLINE float sum(vf x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
// Lane i is the sum of v[i]: in fewer shuffles than one sum after the other.
INLINE vf sums(const vf (&v)[W]) {
  vf two[4], four[2];
  for (int i = 0; i < 4; ++i) two[i] = _mm256_hadd_ps(v[2 * i], v[2 * i + 1]);
  for (int i = 0; i < 2; ++i) four[i] = _mm256_hadd_ps(two[2 * i], two[2 * i + 1]);
  return _mm256_permute2f128_ps(four[0], four[1], 0x20) + _mm256_permute2f128_ps(four[0], four[1], 0x31);
}

// a0 b0 a1 b1 ... of the lower halves, and of the upper ones
INLINE vf interleave_low(vf a, vf b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x20);
}
INLINE vf interleave_high(vf a, vf b) {
  return _mm256_permute2f128_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b), 0x31);
}

INLINE vf widen(__m128i h, f16) { return _mm256_cvtph_ps(h); }
INLINE vf widen(__m128i h, bf16) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
}
INLINE __m128i pack(vf v, f16) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE __m128i pack(vf v, bf16) {
  __m256i u = _mm256_castps_si256(v);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r =
      _mm256_srli_epi32(_mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  r = _mm256_permute4x64_epi64(_mm256_packus_epi32(r, r), 0x08);
  return _mm256_castsi256_si128(r);
}

INLINE vf load(const float* p, All) { return _mm256_loadu_ps(p); }
INLINE vf load(const double* p, All) {
  return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(p + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(p)));
}
INLINE void store(float* p, vf v, All) { _mm256_storeu_ps(p, v); }
INLINE void stream(float* p, vf v) { _mm256_stream_ps(p, v); }  // p aligned to the vector
template <class H>
INLINE vf load(const H* p, All) {
  return widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), H{});
}
template <class H>
INLINE void store(H* p, vf v, All) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack(v, H{}));
}
template <class H>
INLINE void stream(H* p, vf v) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), pack(v, H{}));
}
// What is left of a row, by loads of fixed size: a copy of so many bytes is a call, and its loads wait for its stores.
INLINE vf load(const float* p, Some s) {
  return _mm256_maskload_ps(p, reinterpret_cast<__m256i>(lane_numbers() < static_cast<int32_t>(s.n)));
}
INLINE vf load(const double* p, Some s) {
  double buffer[W] = {};
  memcpy(buffer, p, static_cast<size_t>(s.n) * sizeof(double));
  return load(buffer, All{});
}
template <class H>
INLINE vf load(const H* p, Some s) {
  const char* bytes = reinterpret_cast<const char*>(p);
  uint64_t low = 0, high = 0;
  if (s.n >= 4) {
    memcpy(&low, bytes, 8);
    if (s.n > 4) {  // the last four, those that are known shifted out
      memcpy(&high, bytes + 2 * s.n - 8, 8);
      high >>= 16 * (8 - s.n);
    }
  } else {
    uint16_t last;
    memcpy(&last, p + s.n - 1, 2);
    low = static_cast<uint64_t>(last) << (16 * (s.n - 1));
    if (s.n > 1) {
      uint32_t first;
      memcpy(&first, p, 4);
      low |= first;
    }
  }
  return widen(_mm_set_epi64x(static_cast<int64_t>(high), static_cast<int64_t>(low)), H{});
}
template <class T>
INLINE void store(T* p, vf v, Some s) {
  T buffer[W];
  store(buffer, v, All{});
  memcpy(p, buffer, static_cast<size_t>(s.n) * sizeof(T));
}
INLINE void fence() { _mm_sfence(); }

template <class T>
INLINE void store_pair(T* p, vf a, vf b, bool) {
  store(p, a, All{});
  store(p + W, b, All{});
}
template <class T>
INLINE void stream_pair(T* p, vf a, vf b, bool) {
  stream(p, a);
  stream(p + W, b);
}

}  // namespace tensorlogic::avx2
