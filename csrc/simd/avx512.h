// AVX-512 (F, BW, VL, DQ): 16 float32 lanes, masked tails.
#pragma once

#include <immintrin.h>

#include "kernels.h"

namespace tensorlogic::avx512 {

constexpr int W = 16;
using vf = __m512;
typedef int32_t vi __attribute__((vector_size(64)));

constexpr int MR = 14;        // rows of a product's tile: with two vectors a row, 28 of 32 registers
constexpr int64_t KC = 384;  // depth of its panels
constexpr bool cheap_lookup = true;  // in registers
constexpr bool bf16_in_pairs = true;

struct All {};
struct Some {  // the first n lanes, 0 < n < W
  int64_t n;
  __mmask16 mask() const { return static_cast<__mmask16>((1u << n) - 1); }
};

INLINE vi lane_numbers() { return vi{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
INLINE vf set1(float x) { return _mm512_set1_ps(x); }
INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vf fnma(vf a, vf b, vf c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
INLINE vf product_error(vf a, vf b, vf p) {
  return _mm512_fmsub_ps(a, b, p);
}                                                           // a * b - p, exact where p = a * b
INLINE vf vmax(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
INLINE vf vmin(vf a, vf b) { return _mm512_min_ps(a, b); }
INLINE vf nearest(vf x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE vf vabs(vf x) { return _mm512_abs_ps(x); }
INLINE vf size_up_to(float most, vf x) {  // the lesser of |x| and a positive limit, which NaN becomes
  return _mm512_range_ps(x, set1(most), 0b1010);
}
INLINE vf scale2(vf x, vf n, float least = LEAST_EXPONENT) {  // x * 2^n, n integral; x * 0 where n < least
  const __mmask16 normal = _mm512_cmp_ps_mask(n, set1(least), _CMP_NLT_UQ);  // NaN stays
  return _mm512_mask_scalef_ps(x * set1(0.0f), normal, x, n);
}
INLINE vf scale2_near_one(vf x, vf n, float least = LEAST_EXPONENT) { return scale2(x, n, least); }  // of x from 0.5 to 2
INLINE vf reciprocal_coarse(vf x) {
  return _mm512_rcp14_ps(x);
}  // about 14 bits, for half precision
INLINE vf reciprocal(vf x) {
  vf r = _mm512_rcp14_ps(x);
  return fma(r, fnma(x, r, set1(1.0f)), r);
}
INLINE vf lookup(const float (&table)[32], vi index) {  // table[index mod 32]
  return _mm512_permutex2var_ps(_mm512_loadu_ps(table), reinterpret_cast<__m512i>(index),
                                _mm512_loadu_ps(table + 16));
}
template <int N>
INLINE bool any_below(const vf* x, float limit) {  // a negative one; by bits, among which a negative NaN is below
  __m512i most = _mm512_castps_si512(x[0]);
#pragma GCC unroll 4
  for (int k = 1; k < N; ++k) most = _mm512_max_epu32(most, _mm512_castps_si512(x[k]));
  return _mm512_cmpgt_epu32_mask(most, _mm512_castps_si512(set1(limit)));
}
INLINE vf where_below(vf x, float limit, vf v, vf otherwise) {
  return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(x, set1(limit), _CMP_LT_OQ), v);
}
template <int N>
INLINE int lanes_of(const __mmask16 (&chosen)[N]) {
  int count = 0;
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) count += __builtin_popcount(chosen[k]);
  return count;
}
// y = value(x) in the chosen lanes of N vectors, W of them at most, which are taken together
template <int N, class Value>
INLINE void together(const vf (&x)[N], vf (&y)[N], const __mmask16 (&chosen)[N], Value value) {
  int before[N] = {0};
  vf some = _mm512_maskz_compress_ps(chosen[0], x[0]);
#pragma GCC unroll 4
  for (int k = 1; k < N; ++k) {
    before[k] = before[k - 1] + __builtin_popcount(chosen[k - 1]);
    some = _mm512_mask_permutexvar_ps(some, static_cast<__mmask16>(0xffffu << before[k]),
                                      reinterpret_cast<__m512i>(lane_numbers() - before[k]),
                                      _mm512_maskz_compress_ps(chosen[k], x[k]));
  }
  some = value(some);
  y[0] = _mm512_mask_expand_ps(y[0], chosen[0], some);
#pragma GCC unroll 4
  for (int k = 1; k < N; ++k) {
    const vf mine = _mm512_permutexvar_ps(reinterpret_cast<__m512i>(lane_numbers() + before[k]), some);
    y[k] = _mm512_mask_expand_ps(y[k], chosen[k], mine);
  }
}
// Where x is below `end`, y = value(x), which is -0 below `least`
template <int N, class Value>
INLINE void where_far(const vf (&x)[N], vf (&y)[N], float end, float least, Value value) {
  __mmask16 far[N];
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) far[k] = _mm512_cmp_ps_mask(x[k], set1(end), _CMP_LT_OQ);
  if constexpr (N > 1) {
    unsigned any = far[0], twice = 0;
#pragma GCC unroll 4
    for (int k = 1; k < N; ++k) {
      twice |= any & far[k];
      any |= far[k];
    }
    if (twice == 0) {
      vf some = x[0];
#pragma GCC unroll 4
      for (int k = 1; k < N; ++k) some = _mm512_mask_mov_ps(some, far[k], x[k]);
      some = value(some);
#pragma GCC unroll 4
      for (int k = 0; k < N; ++k) y[k] = _mm512_mask_mov_ps(y[k], far[k], some);
      return;
    }
    if (lanes_of(far) > W)
#pragma GCC unroll 4
      for (int k = 0; k < N; ++k) {
        y[k] = _mm512_mask_mov_ps(y[k], far[k], set1(-0.0f));
        far[k] = _mm512_mask_cmp_ps_mask(far[k], x[k], set1(least), _CMP_GE_OQ);
      }
    if (lanes_of(far) <= W) return together(x, y, far, value);
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) y[k] = _mm512_mask_mov_ps(y[k], far[k], value(x[k]));
}
typedef uint32_t vu __attribute__((vector_size(64)));
// High and low words of m * a
INLINE void multiply(uint32_t m, vu a, vu& high, vu& low) {
  const __m512i v = reinterpret_cast<__m512i>(a), by = _mm512_set1_epi64(m);
  const __m512i even = _mm512_mul_epu32(v, by),
                odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), by);
  high = reinterpret_cast<vu>(_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd));
  low = reinterpret_cast<vu>(_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32)));
}
// Lane i takes lane i ^ by.
INLINE vf turned(vf v, int by) {
  return _mm512_permutexvar_ps(reinterpret_cast<__m512i>(lane_numbers() ^ by), v);
}
// p[lane * step]
INLINE vf strided(const float* p, int64_t step) {
  const vi at = lane_numbers() * static_cast<int32_t>(step);
  return _mm512_i32gather_ps(reinterpret_cast<__m512i>(at), p, 4);
}
INLINE float sum(vf x) { return _mm512_reduce_add_ps(x); }
using vd = __m512d;
INLINE vd fma(vd a, vd b, vd c) { return _mm512_fmadd_pd(a, b, c); }
INLINE vd vmax(vd a, vd b) { return _mm512_max_pd(a, b); }  // b where either is NaN
INLINE vd vabs(vd x) { return _mm512_abs_pd(x); }
INLINE void doubles(vf v, vd (&to)[2]) {
  to[0] = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
  to[1] = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
}
// Lane i is the sum of v[i], in half of the shuffles of one sum after the other.
INLINE vf sums(const vf (&v)[W]) {
  vf two[8], four[4], eight[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i)
    two[i] = _mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]) + _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    four[i] = _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0x44) + _mm512_shuffle_ps(two[2 * i], two[2 * i + 1], 0xee);
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i)
    eight[i] = _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88) +
               _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd);
  return _mm512_shuffle_f32x4(eight[0], eight[1], 0x88) + _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd);
}
// a0 b0 a1 b1 ... of the lower halves, and of the upper ones
INLINE vf interleave_low(vf a, vf b) {
  const __m512i at = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  return _mm512_permutex2var_ps(a, at, b);
}
INLINE vf interleave_high(vf a, vf b) {
  const __m512i at = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  return _mm512_permutex2var_ps(a, at, b);
}

INLINE vf load(const float* p, All) { return _mm512_loadu_ps(p); }
INLINE vf load(const float* p, Some s) { return _mm512_maskz_loadu_ps(s.mask(), p); }
INLINE vf narrowed(__m512d low, __m512d high) {
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
}
INLINE vf load(const double* p, All) { return narrowed(_mm512_loadu_pd(p), _mm512_loadu_pd(p + 8)); }
INLINE vf load(const double* p, Some s) {
  const unsigned mask = s.mask();
  return narrowed(_mm512_maskz_loadu_pd(static_cast<__mmask8>(mask), p),
                  _mm512_maskz_loadu_pd(static_cast<__mmask8>(mask >> 8), p + 8));
}
INLINE vf load(const f16* p, All) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE vf load(const f16* p, Some s) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(s.mask(), p));
}
INLINE vf widen(__m256i h) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}
INLINE vf load(const bf16* p, All) {
  return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
INLINE vf load(const bf16* p, Some s) { return widen(_mm256_maskz_loadu_epi16(s.mask(), p)); }

INLINE __m256i pack(vf v, f16) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
// Not vcvtneps2bf16: that instruction flushes denormals to zero.
INLINE __m512i rounded(vf v) {  // the bfloat16 in the upper half of each lane
  __m512i u = _mm512_castps_si512(v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  return _mm512_mask_mov_epi32(r, _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q),
                               _mm512_set1_epi32(0x7fc00000));
}
INLINE __m256i pack(vf v, bf16) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded(v), 16)); }
// Ties, which results of a transcendental function hardly ever are, go away from zero; what a bfloat16 NaN
// has become stays NaN.
INLINE __m512i nearly_rounded(vf v) {
  return _mm512_add_epi32(_mm512_castps_si512(v), _mm512_set1_epi32(0x8000));
}
INLINE __m512i pack(vf a, vf b, bool ties_even) {  // two vectors to 32 bfloat16
  alignas(64) static const uint16_t upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  const __m512i low = ties_even ? rounded(a) : nearly_rounded(a),
                high = ties_even ? rounded(b) : nearly_rounded(b);
  return _mm512_permutex2var_epi16(low, _mm512_load_si512(upper), high);
}
// Every other one of 32 bfloat16, which a shift or a mask widens and a blend puts together again, without a shuffle.
INLINE vf load(const bf16* p, Even) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16));
}
INLINE vf load(const bf16* p, Odd) {
  return _mm512_castsi512_ps(
      _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
INLINE __m512i blend(vf even, vf odd, bool ties_even) {
  const __m512i low = ties_even ? rounded(even) : nearly_rounded(even),
                high = ties_even ? rounded(odd) : nearly_rounded(odd);
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(low, 16), high);
}
INLINE void store_pair(bf16* p, __m512i v) { _mm512_storeu_si512(p, v); }
INLINE void stream_pair(bf16* p, __m512i v) {
  _mm512_stream_si512(reinterpret_cast<__m512i*>(p), v);
}
INLINE void store(float* p, vf v, All) { _mm512_storeu_ps(p, v); }
INLINE void store(float* p, vf v, Some s) { _mm512_mask_storeu_ps(p, s.mask(), v); }
template <class H>
INLINE void store(H* p, vf v, All) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack(v, H{}));
}
template <class H>
INLINE void store(H* p, vf v, Some s) {
  _mm256_mask_storeu_epi16(p, s.mask(), pack(v, H{}));
}
INLINE void stream(float* p, vf v) { _mm512_stream_ps(p, v); }  // p aligned to the vector
template <class H>
INLINE void stream(H* p, vf v) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(p), pack(v, H{}));
}
INLINE void fence() { _mm_sfence(); }

}  // namespace tensorlogic::avx512
