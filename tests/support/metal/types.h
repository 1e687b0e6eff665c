// The types and the mathematics of the Metal Shading Language, as far as our shaders use them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define device
#define constant const
#define thread

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

namespace metal {

struct bfloat {  // rounds to nearest even; explicit, as in Metal
  uint16_t bits;
  bfloat() = default;
  explicit bfloat(float value) {
    uint32_t u;
    std::memcpy(&u, &value, 4);
    bits = std::isnan(value) ? uint16_t(u >> 16 | 64) : uint16_t((u + 0x7FFF + (u >> 16 & 1)) >> 16);
  }
  operator float() const {
    uint32_t u = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &u, 4);
    return value;
  }
};

template <class To, class From> To as_type(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To bits;
  std::memcpy(&bits, &value, sizeof(To));
  return bits;
}

template <class T, int N> struct lanes_of;
template <class T> struct lanes_of<T, 2> { T x, y; };
template <class T> struct lanes_of<T, 3> { T x, y, z; };
template <class T> struct lanes_of<T, 4> { T x, y, z, w; };

template <class T, int N> struct alignas(sizeof(T) * (N == 3 ? 4 : N)) vec : lanes_of<T, N> {
  vec() = default;
  explicit vec(T value) { for (int i = 0; i < N; i++) (*this)[i] = value; }
  vec(T a, T b) : lanes_of<T, N>{a, b} {}
  vec(T a, T b, T c) : lanes_of<T, N>{a, b, c} {}
  vec(T a, T b, T c, T d) : lanes_of<T, N>{a, b, c, d} {}
  template <class U> explicit vec(const vec<U, N>& o) { for (int i = 0; i < N; i++) (*this)[i] = T(o[i]); }
  T& operator[](int i) { return (&this->x)[i]; }
  const T& operator[](int i) const { return (&this->x)[i]; }
};

#define STANDIN_OPERATOR(op)                                                            \
  template <class T, int N> vec<T, N> operator op(vec<T, N> a, const vec<T, N>& b) {   \
    for (int i = 0; i < N; i++) a[i] = a[i] op b[i];                                   \
    return a;                                                                           \
  }
STANDIN_OPERATOR(+) STANDIN_OPERATOR(-) STANDIN_OPERATOR(*) STANDIN_OPERATOR(/)
#undef STANDIN_OPERATOR

typedef vec<float, 2> float2; typedef vec<float, 3> float3; typedef vec<float, 4> float4;
typedef vec<half, 2> half2; typedef vec<half, 4> half4;
typedef vec<bfloat, 2> bfloat2; typedef vec<bfloat, 4> bfloat4;
typedef vec<uint, 2> uint2; typedef vec<uint, 3> uint3;

// mathematics in float; in half it would round otherwise than here, so half must be widened by the shader
#define STANDIN_UNARY(name) inline float name(float x) { return std::name(x); } float name(half) = delete;
STANDIN_UNARY(exp) STANDIN_UNARY(log) STANDIN_UNARY(sqrt) STANDIN_UNARY(fabs)
#undef STANDIN_UNARY
#define STANDIN_BINARY(name) inline float name(float x, float y) { return std::name(x, y); } \
  float name(half, half) = delete;
STANDIN_BINARY(fmax) STANDIN_BINARY(fmin) STANDIN_BINARY(copysign)
#undef STANDIN_BINARY
inline float rsqrt(float x) { return 1.0f / std::sqrt(x); }
inline float fma(float a, float b, float c) { return std::fma(a, b, c); }
inline bool isnan(float x) { return std::isnan(x); }
inline bool isinf(float x) { return std::isinf(x); }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }

}  // namespace metal
