// What row kernels and reductions share: the walk along a row, tails, extremes.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

// f(i, lanes) over one row, two vectors in flight with separate accumulators chosen by the second
// argument.
#define FOR_ROW(n, ...)                                                                        \
  {                                                                                            \
    int64_t i = 0;                                                                             \
    for (; i + 4 * W <= (n); i += 4 * W) _Pragma("GCC unroll 4") for (int k = 0; k < 4; ++k) { \
        int64_t j = i + k * W;                                                                 \
        All lanes;                                                                             \
        __VA_ARGS__                                                                            \
      }                                                                                        \
    for (; i < (n); i += W) {                                                                  \
      [[maybe_unused]] constexpr int k = 0;                                                    \
      int64_t j = i;                                                                           \
      if (j + W <= (n)) {                                                                      \
        All lanes;                                                                             \
        __VA_ARGS__                                                                            \
      } else {                                                                                 \
        Some lanes{(n) - j};                                                                   \
        __VA_ARGS__                                                                            \
      }                                                                                        \
    }                                                                                          \
  }

// The value in unused lanes of a tail: what `lanes` does not cover becomes `other`.
INLINE vf keep(vf v, vf, All) { return v; }
INLINE vf keep(vf v, vf other, Some s) {
  return lane_numbers() < static_cast<int32_t>(s.n) ? v : other;
}

constexpr float LOWEST = -__builtin_inff();
constexpr int64_t FIRST_BLOCK = 256;
constexpr int64_t BLOCK = 4096;  // elements whose second reading comes from a near cache

// Asks for what a walk along memory soon reads; vector k of four in flight, one request a cache line.
constexpr int64_t FAR_FROM = 16384;  // elements below which what is asked for would not be used
template <class T>
INLINE void ask_ahead(const T* p, int k, bool far) {
  if (far && k * W * static_cast<int>(sizeof(T)) % 64 == 0) __builtin_prefetch(p + AHEAD);
}

// Maximum and minimum that keep NaN.
INLINE vf larger(vf acc, vf x) {
  vf m = vmax(acc, x);  // x where either is NaN
  return acc != acc ? acc : m;
}
INLINE vf smaller(vf acc, vf x) {
  vf m = vmin(acc, x);
  return acc != acc ? acc : m;
}
struct Add {
  INLINE_MEMBER vf operator()(vf acc, vf x) const { return acc + x; }
};
struct Larger {
  INLINE_MEMBER vf operator()(vf acc, vf x) const { return larger(acc, x); }
};
struct Smaller {
  INLINE_MEMBER vf operator()(vf acc, vf x) const { return smaller(acc, x); }
};

// One value of all lanes: halves folded onto each other.
template <class F>
INLINE float folded(vf v, F fold) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2) v = fold(v, turned(v, half));
  return v[0];
}
INLINE float largest(vf v) { return folded(v, Larger{}); }
INLINE float smallest(vf v) { return folded(v, Smaller{}); }
INLINE vf total(const vf (&a)[4]) { return (a[0] + a[2]) + (a[1] + a[3]); }

}  // namespace tensorlogic::TENSORLOGIC_ISA
