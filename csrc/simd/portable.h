// 4 float32 lanes in the compiler's own vector types: any machine; NEON and its half conversions on
// 64-bit ARM.
#pragma once

#include <string.h>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

namespace tensorlogic::portable {

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));
typedef uint16_t vh __attribute__((vector_size(8)));

#if defined(__aarch64__)
constexpr int MR = 12;  // rows of a product's tile: with two vectors a row, 24 of 32 registers
#else
constexpr int MR = 6;  // 12 of 16
#endif
constexpr int64_t KC = 384;  // depth of its panels
constexpr bool cheap_lookup = false;  // in registers
constexpr bool bf16_in_pairs = false;

struct All {};
struct Some {  // the first n lanes, 0 < n < W
  int64_t n;
};

INLINE vi lane_numbers() { return vi{0, 1, 2, 3}; }
INLINE vf set1(float x) { return vf{x, x, x, x}; }
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }  // b where either is NaN
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }
INLINE vf vabs(vf x) { return reinterpret_cast<vf>(reinterpret_cast<vi>(x) & 0x7fffffff); }
INLINE vf size_up_to(float most, vf x) { return vmin(vabs(x), set1(most)); }
#if defined(__aarch64__)
INLINE vf fma(vf a, vf b, vf c) { return reinterpret_cast<vf>(vfmaq_f32(c, a, b)); }
INLINE vf fnma(vf a, vf b, vf c) { return reinterpret_cast<vf>(vfmsq_f32(c, a, b)); }  // c - a * b
INLINE vf product_error(vf a, vf b, vf p) {
  return fma(a, b, -p);
}  // a * b - p, exact where p = a * b
INLINE vf nearest(vf x) { return reinterpret_cast<vf>(vrndnq_f32(x)); }
#else
INLINE vf fma(vf a, vf b, vf c) { return a * b + c; }
INLINE vf fnma(vf a, vf b, vf c) { return c - a * b; }
INLINE vf product_error(vf a, vf b,
                        vf p) {  // a * b - p, exact where p = a * b: double holds the product
  typedef double vd __attribute__((vector_size(32)));
  return __builtin_convertvector(__builtin_convertvector(a, vd) * __builtin_convertvector(b, vd) -
                                     __builtin_convertvector(p, vd),
                                 vf);
}
INLINE vf
nearest(vf x) {  // adding and taking away 1.5 * 2^23 rounds; larger numbers are integral already
  vf big = set1(12582912.0f), r = (x + big) - big;
  return vabs(x) < set1(4194304.0f) ? r : x;
}
#endif
INLINE vf pow2(vi n) { return reinterpret_cast<vf>((n + 127) << 23); }
// x * 2^n, n integral, below 250; x * 0 where n < least. In two steps, for what is too large for one
INLINE vf scale2(vf x, vf n, float least = LEAST_EXPONENT) {
  n = n == n ? n : set1(0.0f);
  const vi normal = n >= set1(least);
  const vi i = __builtin_convertvector(vmax(set1(least), n), vi), half = i >> 1;
  return x * reinterpret_cast<vf>(reinterpret_cast<vi>(pow2(half)) & normal) * pow2(i - half);
}
INLINE vf scale2_near_one(vf x, vf n, float least = LEAST_EXPONENT) { return scale2(x, n, least); }  // of x from 0.5 to 2
INLINE vf reciprocal(vf x) { return set1(1.0f) / x; }
INLINE vf reciprocal_coarse(vf x) { return set1(1.0f) / x; }
INLINE vf lookup(const float (&table)[32], vi index) {  // table[index mod 32]
  return vf{table[index[0] & 31], table[index[1] & 31], table[index[2] & 31], table[index[3] & 31]};
}
INLINE vf lookup(const float (&table)[8], vi index) {  // table[index mod 8]
  return vf{table[index[0] & 7], table[index[1] & 7], table[index[2] & 7], table[index[3] & 7]};
}
template <int N>  // for levels with cheap look-ups, as what follows
INLINE bool any_below(const vf*, float) {
  return true;
}
INLINE vf where_below(vf x, float limit, vf v, vf otherwise) { return x < set1(limit) ? v : otherwise; }
template <int N, class Value>
INLINE void where_far(const vf (&)[N], vf (&)[N], float, float, Value) {}
// High and low words of m * a
INLINE void multiply(uint32_t m, vu a, vu& high, vu& low) {
  typedef uint64_t wide __attribute__((vector_size(16)));
  wide even = (reinterpret_cast<wide>(a) & 0xffffffffu) * m,
       odd = (reinterpret_cast<wide>(a) >> 32) * m;
  high = reinterpret_cast<vu>((even >> 32) | (odd & 0xffffffff00000000u));
  low = reinterpret_cast<vu>((even & 0xffffffffu) | (odd << 32));
}
// Lane i takes lane i ^ by.
INLINE vf turned(vf v, int by) {
  return vf{v[by], v[1 ^ by], v[2 ^ by], v[3 ^ by]};
}
// p[lane * step]
INLINE vf strided(const float* p, int64_t step) {
  return vf{p[0], p[step], p[2 * step], p[3 * step]};
}
typedef double vd __attribute__((vector_size(16)));
INLINE vd fma(vd a, vd b, vd c) { return a * b + c; }
INLINE vd vmax(vd a, vd b) { return a > b ? a : b; }
INLINE vd vabs(vd x) { return x < 0 ? -x : x; }
INLINE void doubles(vf v, vd (&to)[2]) {
  to[0] = vd{v[0], v[1]};
  to[1] = vd{v[2], v[3]};
}
INLINE float sum(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
INLINE vf sums(const vf (&v)[W]) { return vf{sum(v[0]), sum(v[1]), sum(v[2]), sum(v[3])}; }  // of each
// a0 b0 a1 b1 of the lower halves, and of the upper ones
INLINE vf interleave_low(vf a, vf b) { return vf{a[0], b[0], a[1], b[1]}; }
INLINE vf interleave_high(vf a, vf b) { return vf{a[2], b[2], a[3], b[3]}; }

INLINE vf widen(vh h, bf16) { return reinterpret_cast<vf>(__builtin_convertvector(h, vu) << 16); }
INLINE vh pack(vf v, bf16) {
  vu u = reinterpret_cast<vu>(v);
  vu r = (u + ((u >> 16) & 1) + 0x7fff) >> 16;
  vu nan = vu{0x7fc0, 0x7fc0, 0x7fc0, 0x7fc0};
  return __builtin_convertvector(v == v ? r : nan, vh);
}
#if defined(__aarch64__)
INLINE vf widen(vh h, f16) {
  return reinterpret_cast<vf>(vcvt_f32_f16(reinterpret_cast<float16x4_t>(h)));
}
INLINE vh pack(vf v, f16) { return reinterpret_cast<vh>(vcvt_f16_f32(v)); }
#else
INLINE vf widen(vh h, f16) {  // exponent rebias by a product, which also turns denormals right
  vu u = __builtin_convertvector(h, vu);
  vf magnitude = reinterpret_cast<vf>((u & 0x7fff) << 13) * set1(0x1p112f);
  vu bits = reinterpret_cast<vu>(magnitude) | ((u & 0x8000) << 16);
  vu special = reinterpret_cast<vu>((u & 0x7c00) == 0x7c00);
  return reinterpret_cast<vf>(bits | (special & 0x7f800000));
}
INLINE vh pack(vf v, f16) {
  vu u = reinterpret_cast<vu>(v), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
  vu normal = (a + 0xc8000fff + ((a >> 13) & 1)) >> 13;  // rebias, round to nearest even
  vf tiny =
      reinterpret_cast<vf>(a) + set1(0.5f);  // the sum's last bit is 2^-24, f16's smallest step
  vu denormal = reinterpret_cast<vu>(tiny) - 0x3f000000;
  vu inf = vu{0x7c00, 0x7c00, 0x7c00, 0x7c00}, nan = vu{0x7e00, 0x7e00, 0x7e00, 0x7e00};
  vu r = a < 0x38800000 ? denormal : normal;
  r = a >= 0x477ff000 ? inf : r;
  r = a > 0x7f800000 ? nan : r;
  return __builtin_convertvector(r | sign, vh);
}
#endif

template <class H>
INLINE vf load(const H* p, All) {
  vh h;
  memcpy(&h, p, sizeof(h));
  return widen(h, H{});
}
template <class H>
INLINE void store(H* p, vf v, All) {
  vh h = pack(v, H{});
  memcpy(p, &h, sizeof(h));
}
INLINE vf load(const float* p, All) {
  vf v;
  memcpy(&v, p, sizeof(v));
  return v;
}
INLINE vf load(const double* p, All) {
  vf v;
  for (int i = 0; i < W; ++i) v[i] = static_cast<float>(p[i]);
  return v;
}
INLINE void store(float* p, vf v, All) { memcpy(p, &v, sizeof(v)); }
template <class T>
INLINE vf load(const T* p, Some s) {
  T buffer[W] = {};
  memcpy(buffer, p, static_cast<size_t>(s.n) * sizeof(T));
  return load(buffer, All{});
}
template <class T>
INLINE void store(T* p, vf v, Some s) {
  T buffer[W];
  store(buffer, v, All{});
  memcpy(p, buffer, static_cast<size_t>(s.n) * sizeof(T));
}
template <class T>
INLINE void stream(T* p, vf v) {
  store(p, v, All{});
}
INLINE void fence() {}

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

}  // namespace tensorlogic::portable
