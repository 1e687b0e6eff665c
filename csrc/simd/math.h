// exp and the activations on vectors, at most 2 ulp of T from the exact value (T is the type that
// is stored; 3 for float32 where there is no fused multiply-add). float32 carries the low part of
// exponents along, so that far tails keep their relative accuracy; half types do not need it.
#pragma once

#include "tables.h"

namespace tensorlogic::TENSORLOGIC_ISA {

template <class T>
constexpr bool precise = sizeof(T) == 4;

struct Scaled {  // p * 2^n
  vf p, n;
};

template <int N>
INLINE vf polynomial(vf x, const float (&c)[N]) {
  vf r = set1(c[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; --i) r = fma(r, x, set1(c[i]));
  return r;
}

// e^(x + low), |x| < 175, as (1 + t) * 2^n: the last rounding is left to the caller
struct Grown {
  vf t, n;
};
INLINE Grown grown(vf n, vf r) {
  const float c[] = {0.49999993f, 0.1666652f, 0.041668394f, 0.00836878f, 0.0013814467f};
  return {fma(r * r, polynomial(r, c), r), n};
}
INLINE vf steps(vf x) { return nearest(x * set1(1.44269504f)); }
INLINE vf remainder(vf x, vf n) {
  return fnma(n, set1(-2.12194440e-4f), fnma(n, set1(0x1.63p-1f), x));
}
INLINE Grown exp_grown(vf x, vf low) {
  vf n = steps(x);
  return grown(n, remainder(x, n) + low);
}
INLINE Scaled exp_precise(vf x, vf low) {
  Grown e = exp_grown(x, low);
  return {e.t + set1(1.0f), e.n};
}

// 2^z to 18 bits, |z| < 250
INLINE Scaled exp2_coarse(vf z) {
  vf n = nearest(z);
  const float c[] = {0.99999926f, 0.69312181f, 0.24024745f, 0.05591786f, 0.0095701f};
  return {polynomial(z - n, c), n};
}

constexpr float LOG2E = 1.44269504f;

// e^(x - m) for x - m <= 88; minus infinity, and what is below 2^least, gives 0, NaN stays
template <class T>
INLINE vf exp_minus(vf x, vf m, float least = LEAST_EXPONENT) {
  if constexpr (precise<T>) {
    x = vmax(set1(-110.0f), x - m);
    vf n = steps(x);
    return scale2_near_one(grown(n, remainder(x, n)).t + set1(1.0f), n, least);
  }
  Scaled e = exp2_coarse(vmax(set1(-160.0f), (x - m) * set1(LOG2E)));
  return scale2_near_one(e.p, e.n, least);
}
template <class T>
INLINE vf exp(vf x) {
  return exp_minus<T>(x, set1(0.0f));
}

// sum + e^(x - m): what is below e^-87 counts as that, and where x - m passes 80 the sum is meaningless.
// Thirty-two powers of two come from a table whose entries make up for their own index in the exponent.
template <class T>
INLINE vf add_exp(vf sum, vf x, vf m) {
  if constexpr (!cheap_lookup) return sum + exp_minus<T>(x, m);
  const vf magic = set1(12582912.0f);
  const vf d = vmax(set1(-87.0f), x - m), u = fma(d, set1(32.0f * LOG2E), magic), n = u - magic;
  const vf r = fnma(n, set1(0.6931472f / 32.0f), d);  // off by |d| 2^-28
  const vf less = lookup(EXP2_LESS_INDEX[0], reinterpret_cast<vi>(u));
  const vu power = reinterpret_cast<vu>(less) + (reinterpret_cast<vu>(u) << 18);  // which may wrap
  const vf grown = fma(fma(set1(0.50000451f), r, set1(1.00001465f)), r, set1(1.0f));
  return fma(reinterpret_cast<vf>(power), grown, sum);
}

// e^-|z + low|
template <class T>
INLINE Scaled decay_of(vf z, vf low) {
  vf a = vmax(set1(-170.0f), -vabs(z));
  if constexpr (!precise<T>) return exp2_coarse(a * set1(LOG2E));
  low = z < set1(0.0f) ? low : -low;
  return exp_precise(a, vabs(z) < set1(150.0f) ? low : set1(0.0f));
}

// Exponentials that go into products are kept 2^64 times too large: tails stay normal numbers until
// the last rounding, and what is zero nevertheless makes NaN out of infinity, as PyTorch has it.
constexpr float DOWN = 0x1p-64f;
INLINE vf enlarging(vf n) { return n < set1(LEAST_EXPONENT) ? n : n + set1(64.0f); }
INLINE vf enlarged(Scaled e) { return scale2_near_one(e.p, enlarging(e.n)); }

// x / (1 + e^-(z + low)); for float32 the quotient is carried in two parts up to the last rounding
template <class T>
INLINE vf times_sigmoid(vf x, vf z, vf low) {
  Scaled e = decay_of<T>(z, low);
  if constexpr (!precise<T>) {
    vf decay = scale2_near_one(e.p, e.n);
    return (z < set1(0.0f) ? x * decay : x) * reciprocal_coarse(set1(1.0f) + decay);
  }
  vf large = enlarged(e), d = fma(large, set1(DOWN), set1(1.0f)),
     d_low = fma(large, set1(DOWN), set1(1.0f) - d);
  vf above = z < set1(0.0f) ? large : set1(1.0f), r = reciprocal(d), h = above * r;
  vf l = r * fnma(h, d_low, -product_error(h, d, above));
  return z < set1(0.0f) ? fma(x, h, x * l) * set1(DOWN) : x * (h + l);
}

template <class A, class B>
struct Same {
  static constexpr bool value = false;
};
template <class A>
struct Same<A, A> {
  static constexpr bool value = true;
};
template <class A, class B>
constexpr bool Is = Same<A, B>::value;

// gelu_tanh(x) = x * sigmoid(z), z = 2 sqrt(2 / pi) (x + 0.044715 x^3)
constexpr float TANH_1 = 1.5957691216057308f,
                TANH_1_LOW = static_cast<float>(1.5957691216057308 - TANH_1);
constexpr float TANH_3 = 0.07135481627159976f,
                TANH_3_LOW = static_cast<float>(0.07135481627159976 - TANH_3);

// Half types have so few digits that one polynomial in |x| a segment gives the share of x that passes: for
// float16's short range everywhere a cubic, for bfloat16 a quadratic up to a limit. Above it all of x passes, below
// its negative an exponential is left.
template <Activation A>
struct GateTable;
#define GATE(A, NAME)                                                                                 \
  template <>                                                                                         \
  struct GateTable<Activation::A> {                                                                   \
    static constexpr float step = NAME##_STEP, end = NAME##_END, scale = NAME##_COARSE_SCALE,         \
                           limit = NAME##_LIMIT;                                                      \
    static constexpr const float (&fine)[4][32] = NAME##_GATE, (&coarse)[3][32] = NAME##_COARSE_GATE; \
  };
GATE(gelu, GELU)
GATE(gelu_tanh, GELU_TANH)
GATE(silu, SILU)
#undef GATE

template <class T, Activation A>
constexpr bool gates = cheap_lookup && !precise<T> && A >= Activation::gelu;
// N vectors step by step: a Zen 5 has some hundred vector instructions in flight, and one vector's chain is 50 cycles long.
// The addition that makes an index rounds, and leaves the segment's number in the low bits.
constexpr float ROUND = 12582912.0f;
template <int N, int D>
INLINE void shares(const vf (&a)[N], const vf (&index)[N], const float (&table)[D][32], vf (&share)[N]) {
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) share[k] = lookup(table[D - 1], reinterpret_cast<vi>(index[k]));
#pragma GCC unroll 3
  for (int i = D - 2; i >= 0; --i)
#pragma GCC unroll 4
    for (int k = 0; k < N; ++k)
      share[k] = fma(share[k], a[k], lookup(table[i], reinterpret_cast<vi>(index[k])));
}
// The base-2 exponent of the share of x that passes far below zero, where its remainder is near 1
template <Activation A>
INLINE vf far_exponent(vf x) {
  vf z;
  if constexpr (A == Activation::gelu) z = x * x * set1(-0.5f * LOG2E);
  if constexpr (A == Activation::gelu_tanh)
    z = x * fma(x * x, set1(TANH_3 * LOG2E), set1(TANH_1 * LOG2E));
  if constexpr (A == Activation::silu) z = x * set1(LOG2E);
  return vmax(set1(-250.0f), z);
}
// bfloat16's, where x is below the limit: minus infinity gives NaN
template <Activation A, int N>
INLINE void far_all(const vf (&x)[N], vf (&y)[N]) {
  vf z[N], n[N], power[N];
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) z[k] = far_exponent<A>(x[k]);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) n[k] = nearest(z[k]);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    const float c[] = {0.99992811f, 0.69326099f, 0.24261054f, 0.05517132f};
    power[k] = polynomial(z[k] - n[k], c);
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    vf far;
    if constexpr (A == Activation::gelu) {  // the normal tail over its exponential, by powers of 1 / x
      const float c[] = {-0.3989184f, 0.39309514f, -0.87188911f};
      const vf r = reciprocal_coarse(x[k]);
      far = scale2(x[k] * r * polynomial(r * r, c) * power[k], n[k]);
    } else {
      far = x[k] * scale2(power[k], n[k]);
    }
    y[k] = where_below(x[k], -GateTable<A>::limit, far, y[k]);
  }
}

template <class T, Activation A, int N>
INLINE void gate_all(vf (&x)[N]) {
  using G = GateTable<A>;
  constexpr float end = Is<T, f16> ? G::end : G::limit;
  vf a[N], index[N], share[N], y[N];
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) a[k] = size_up_to(end, x[k]);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k)
    index[k] = Is<T, f16> ? a[k] + set1(ROUND * G::step) : fma(a[k], set1(G::scale), set1(ROUND));
  if constexpr (Is<T, f16>)
    shares(a, index, G::fine, share);
  else
    shares(a, index, G::coarse, share);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {  // a share of 0 makes NaN of minus infinity, but not of infinity; -0 stays
    const vi size = reinterpret_cast<vi>(a[k]), whole = reinterpret_cast<vi>(x[k]);
    const vf of = Is<T, f16> ? vabs(reinterpret_cast<vf>(whole < size ? whole : size)) : a[k];
    y[k] = fnma(of, share[k], vmax(set1(-0.0f), x[k]));
  }
  if constexpr (!Is<T, f16>)
    if (any_below<N>(x, -G::limit)) far_all<A>(x, y);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) x[k] = y[k];
}
template <class T, Activation A>
INLINE vf gated(vf x) {
  vf one[1] = {x};
  gate_all<T, A>(one);
  return one[0];
}

// float32: powers of the distance from a point of the segment, whose share has hardly a rounding error
// of its own. Segments narrow as the share falls faster; at the table's end too little is left of x for float32 to tell, so that above it all passes.
template <Activation A>
struct NearTable;
#define NEAR(A, NAME, LEAST)  /* below which nothing is left that counts: 2^LEAST_EXPONENT */                  \
  template <>                                                                                                 \
  struct NearTable<Activation::A> {                                                                           \
    static constexpr float scale = NAME##_NEAR_SCALE, bend = NAME##_NEAR_BEND, end = NAME##_NEAR, least = LEAST; \
    static constexpr const float (&point)[1][32] = NAME##_NEAR_POINT, (&gate)[6][32] = NAME##_NEAR_GATE;      \
  };
NEAR(gelu, GELU, -13.2f)
NEAR(gelu_tanh, GELU_TANH, -10.0f)
NEAR(silu, SILU, -85.0f)
#undef NEAR
template <Activation A, int N>
INLINE void gated_near(const vf (&x)[N], vf (&y)[N]) {
  using G = NearTable<A>;
  vi index[N];
  vf a[N], d[N];
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) a[k] = size_up_to(G::end, x[k]);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) {
    const vf rise = G::bend != 0.0f ? fma(a[k], set1(G::bend), set1(G::scale)) : set1(G::scale);
    index[k] = reinterpret_cast<vi>(fma(a[k], rise, set1(ROUND)));
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) d[k] = a[k] - lookup(G::point[0], index[k]);
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) y[k] = lookup(G::gate[5], index[k]);
#pragma GCC unroll 5
  for (int i = 4; i >= 0; --i)
#pragma GCC unroll 4
    for (int k = 0; k < N; ++k) y[k] = fma(y[k], d[k], lookup(G::gate[i], index[k]));
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) y[k] = fnma(a[k], y[k], vmax(set1(-0.0f), x[k]));  // NaN and -0 stay
}
// What is left of |x| below zero, from the table's end on
INLINE Scaled silu_left(vf x) {
  const vf a = vmin(set1(130.0f), vabs(x)), n = steps(-a);
  const vf t = grown(n, remainder(-a, n)).t, left = fma(a, t, a);
  return {fnma(left, scale2(t + set1(1.0f), n), left), n};
}
INLINE Scaled gelu_tanh_left(vf x) {
  const vf a = vmin(set1(14.0f), vabs(x)), a2 = a * a, p = a2 * set1(TANH_3);
  const vf a2_low = product_error(a, a, a2), p_low = product_error(a2, set1(TANH_3), p);
  const vf c = p + set1(TANH_1), c_low = set1(TANH_1) - (c - p) + p_low;
  const vf more = c_low + fma(a2, set1(TANH_3_LOW), fma(a2_low, set1(TANH_3), set1(TANH_1_LOW)));
  const vf z = a * c, z_low = fma(a, more, product_error(a, c, z)), n = steps(-z);
  const vf t = grown(n, remainder(-z, n) - z_low).t, left = fma(a, t, a);
  return {fnma(left, scale2(t + set1(1.0f), n), left), n};
}
// The lower tail times |x| is the exponential by a slow function of 1 / x^2. Multiplications are what it takes its time for:
// r is minus twice what is left of the exponent, which saves halving twice.
INLINE Scaled gelu_left(vf x) {
  const float c[] = {0.398942262f, -0.398936033f, 1.19560778f, -5.87092066f,
                     36.1124077f,  -200.381317f,  618.781433f};
  const float e[] = {0.49999993f / 4, -0.1666652f / 8, 0.041668394f / 16, -0.00836878f / 32, 0.0013814467f / 64};
  const vf a = vmin(set1(18.0f), vabs(x)), h = a * a, n = nearest(h * set1(-0.5f * LOG2E));
  const vf left = fma(n, set1(-4.24388880e-4f), fma(n, set1(0x1.63p0f), h));
  const vf r = left + product_error(a, a, h);
  const vf t = fma(r * r, polynomial(r, e), r * set1(-0.5f)), g = polynomial(reciprocal(h), c);
  return {fma(g, t, g), n};
}
template <Activation A>
INLINE Scaled left_far(vf x) {
  if constexpr (A == Activation::silu) return silu_left(x);
  if constexpr (A == Activation::gelu_tanh) return gelu_tanh_left(x);
  return gelu_left(x);
}
// float32; minus infinity gives NaN, as its share is 0
template <Activation A, int N>
INLINE void near_all(vf (&x)[N]) {
  constexpr float end = -NearTable<A>::end;
  vf y[N];
  gated_near<A>(x, y);
  if (__builtin_expect(any_below<N>(x, end), 0)) {
    where_far(x, y, end, NearTable<A>::least, [](vf some) INLINE_LAMBDA {
      const Scaled left = left_far<A>(some);
      return set1(-0.0f) - scale2(left.p, left.n);
    });
    if (any_below<N>(x, -3.40282347e38f))
#pragma GCC unroll 4
      for (int k = 0; k < N; ++k) y[k] = where_below(x[k], -3.40282347e38f, set1(__builtin_nanf("")), y[k]);
  }
#pragma GCC unroll 4
  for (int k = 0; k < N; ++k) x[k] = y[k];
}
template <Activation A>
INLINE vf near_one(vf x) {
  vf one[1] = {x};
  near_all<A>(one);
  return one[0];
}

template <class T>
INLINE vf silu(vf x) {
  if constexpr (gates<T, Activation::silu>) return gated<T, Activation::silu>(x);
  if constexpr (cheap_lookup && precise<T>) return near_one<Activation::silu>(x);
  return times_sigmoid<T>(x, x, set1(0.0f));
}

template <class T>
INLINE vf gelu_tanh(vf x) {
  if constexpr (gates<T, Activation::gelu_tanh>) return gated<T, Activation::gelu_tanh>(x);
  if constexpr (cheap_lookup && precise<T>) return near_one<Activation::gelu_tanh>(x);
  vf x2 = x * x;
  if constexpr (!precise<T>) return times_sigmoid<T>(x, x * fma(x2, set1(TANH_3), set1(TANH_1)), x);
  vf x2_low = product_error(x, x, x2);
  vf p = x2 * set1(TANH_3), p_low = product_error(x2, set1(TANH_3), p);
  vf t = p + set1(TANH_1), back = t - p;
  vf t_low = (p - (t - back)) + (set1(TANH_1) - back);
  t_low = t_low + p_low + fma(x2, set1(TANH_3_LOW), fma(x2_low, set1(TANH_3), set1(TANH_1_LOW)));
  vf z = x * t;
  return times_sigmoid<T>(x, z, fma(x, t_low, product_error(x, t, z)));
}

// The normal distribution's lower tail is P(X < -a) = mills(a) * e^(-a^2 / 2).
// float32: by segments of a + 1, whose exponent and first bits of mantissa are the index; mills to 2^-28. Where
// a look-up of 32 numbers is a gather, by eight segments and a higher degree.
template <int DEGREE, int SEGMENTS>
INLINE vf mills_by(vf a, vi index, const float (&point)[1][SEGMENTS], const float (&table)[DEGREE + 1][SEGMENTS]) {
  vf d = a - lookup(point[0], index), mills = lookup(table[DEGREE], index);
#pragma GCC unroll 8
  for (int i = DEGREE - 1; i >= 0; --i) mills = fma(mills, d, lookup(table[i], index));
  return mills;
}
INLINE vf mills_precise(vf a) {
  a = vmin(set1(14.99f), a);
  const vi bits = reinterpret_cast<vi>(a + set1(1.0f));
  if constexpr (cheap_lookup) return mills_by<5>(a, bits >> 20, MILLS_POINT, MILLS);
  else return mills_by<8>(a, bits >> 22, MILLS_FEW_POINT, MILLS_FEW);
}
INLINE vf mills_coarse(vf a) {
  const float p[] = {0.50001263f, 0.27927168f, 0.062949262f};
  const float q[] = {1.0f, 1.3572083f, 0.70494211f, 0.15762402f};
  return polynomial(a, p) * reciprocal_coarse(polynomial(a, q));
}

template <class T>
INLINE vf gelu(vf x) {
  if constexpr (gates<T, Activation::gelu>) return gated<T, Activation::gelu>(x);
  if constexpr (cheap_lookup && precise<T>) return near_one<Activation::gelu>(x);
  vf a = vmin(set1(18.0f), vabs(x)), h = a * a;
  if constexpr (!precise<T>) {
    Scaled e = exp2_coarse(h * set1(-0.5f * LOG2E));
    vf tail = mills_coarse(a) * scale2_near_one(e.p, e.n);
    return x * (x < set1(0.0f) ? tail : set1(1.0f) - tail);
  }
  // Both sides carry what their last product but one lost. DOWN and its inverse: as for `enlarged`.
  Grown e = exp_grown(h * set1(-0.5f), product_error(a, a, h) * set1(-0.5f));
  vf mills = mills_precise(a), tail = fma(mills, e.t, mills), low = fma(mills, e.t, mills - tail),
     n = enlarging(e.n);
  tail = scale2(tail, n);
  vf lower = fma(x, tail, x * scale2(low, n)) * set1(DOWN);
  vf rest = fnma(tail, set1(DOWN), set1(1.0f)), lost = fnma(tail, set1(DOWN), set1(1.0f) - rest);
  return x < set1(0.0f) ? lower : fma(x, rest, vmin(set1(3e38f), x) * lost);
}

// maximum(x, 0) that keeps NaN
INLINE vf relu(vf x) { return vmax(set1(0.0f), x); }

template <class T>
INLINE vf gelu_grad(vf x) {
  vf a = vmin(set1(18.0f), vabs(x)), decay = exp<T>(a * a * set1(-0.5f));
  vf tail = (precise<T> ? mills_precise(a) : mills_coarse(a)) * decay;
  return fma(x, decay * set1(0.3989422804f), x < set1(0.0f) ? tail : set1(1.0f) - tail);
}

// s = 1 / (1 + e^-z) and its slope s (1 - s)
struct Gate {
  vf value, slope;
};
template <class T>
INLINE Gate gate(vf z) {
  Scaled e = decay_of<T>(z, set1(0.0f));
  vf decay = scale2_near_one(e.p, e.n), d = set1(1.0f) + decay,
     r = precise<T> ? reciprocal(d) : reciprocal_coarse(d);
  return {z < set1(0.0f) ? decay * r : r, decay * r * r};
}

template <class T>
INLINE vf gelu_tanh_grad(vf x) {
  vf x2 = vmin(set1(1e8f), x * x);  // beyond, the gate is 0 or 1 and 0 * infinity must not appear
  Gate g = gate<T>(x * fma(x2, set1(TANH_3), set1(TANH_1)));
  return fma(x * fma(x2, set1(3.0f * TANH_3), set1(TANH_1)), g.slope, g.value);
}

template <class T>
INLINE vf silu_grad(vf x) {
  Gate g = gate<T>(x);
  return fma(x, g.slope, g.value);
}

template <class T, Activation A>
INLINE vf activate(vf x) {
  if constexpr (A == Activation::relu) return relu(x);
  if constexpr (A == Activation::gelu) return gelu<T>(x);
  if constexpr (A == Activation::gelu_tanh) return gelu_tanh<T>(x);
  if constexpr (A == Activation::silu) return silu<T>(x);
  return x;
}

// Whether an activation takes N vectors at once, and does: their chains overlap.
template <class T, Activation A>
constexpr bool grouped = cheap_lookup && A >= Activation::gelu;
template <class T, Activation A, int N>
INLINE void activate_all(vf (&x)[N]) {
  if constexpr (precise<T>)
    near_all<A>(x);
  else
    gate_all<T, A>(x);
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
