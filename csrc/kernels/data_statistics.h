// What a guard of precision looks at: norms and peaks of rows, by a sketch of their elements, summed in
// float32 where its range holds them, else in float64.
#pragma once

#include <string.h>

namespace tensorlogic::TENSORLOGIC_ISA {

constexpr int HALF = W / 2;
constexpr int64_t LOOKED_RUN = 16;  // places of a sketch that lie side by side
constexpr int64_t LOOKED_BESIDE = 2 * W;  // columns that are fetched before they are looked at
constexpr int64_t LOOKED_AHEAD = 12;       // rows that are fetched before they are looked at

INLINE int64_t lanes_of(All) { return W; }
INLINE int64_t lanes_of(Some lanes) { return lanes.n; }

template <class T, class Lanes>
INLINE void as_doubles(const T* p, Lanes lanes, vd (&to)[2]) {
  doubles(keep(load(p, lanes), set1(0.0f), lanes), to);
}
template <class Lanes>
INLINE void as_doubles(const double* p, Lanes lanes, vd (&to)[2]) {
  to[0] = to[1] = vd{};
  memcpy(to, p, static_cast<size_t>(lanes_of(lanes)) * sizeof(double));
}

// One value of all lanes, halves with halves: a chain of additions takes as long as the memory.
template <class V, class F>
INLINE double over_lanes(V v, const F& both) {
  constexpr size_t BYTES = sizeof(V) / 2;
  if constexpr (BYTES == sizeof(double)) {
    return both(v[0], v[1]);
  } else {
    typedef double Half __attribute__((vector_size(BYTES)));
    Half halves[2];
    memcpy(halves, &v, sizeof v);
    return over_lanes(both(halves[0], halves[1]), both);
  }
}

// Norms and peaks of W rows, or of one row by W columns.
struct Seen {
  vd squares[2] = {}, peaks[2] = {};
  template <class T, class Lanes>
  INLINE_MEMBER void see(const T* p, Lanes lanes) {
    vd v[2];
    as_doubles(p, lanes, v);
    for (int h = 0; h < 2; ++h) {
      squares[h] = fma(v[h], v[h], squares[h]);
      peaks[h] = vmax(vabs(v[h]), peaks[h]);  // a NaN shows in the squares
    }
  }
  INLINE_MEMBER void write(All, double* square, double* peak) const {
    memcpy(square, squares, sizeof squares);
    if (peak) memcpy(peak, peaks, sizeof peaks);
  }
  INLINE_MEMBER void write(Some lanes, double* square, double* peak) const {
    for (int64_t l = 0; l < lanes.n; ++l) square[l] = squares[l / HALF][l % HALF];
    for (int64_t l = 0; peak && l < lanes.n; ++l) peak[l] = peaks[l / HALF][l % HALF];
  }
  INLINE_MEMBER void write_all(double* square, double* peak) const {  // of one row
    *square = over_lanes(squares[0] + squares[1], [](auto a, auto b) { return a + b; });
    if (peak) *peak = over_lanes(vmax(peaks[0], peaks[1]), [](auto a, auto b) { return a > b ? a : b; });
  }
};

constexpr float LEAST_SQUARES = 0x1p-100f, MOST_SQUARES = 0x1p120f;  // whose sums float32 holds, and none that matters was lost

// The same in float32: of W rows, or of one row by W columns.
struct SeenSingly {
  vf squares = set1(0.0f), peaks = set1(0.0f);
  template <class T, class Lanes>
  INLINE_MEMBER void see(const T* p, Lanes lanes) {
    const vf v = load(p, lanes);
    squares = fma(v, v, squares);
    peaks = vmax(vabs(v), peaks);
  }
};

// Writes those of W lines or fewer; false, and nothing written, where float32 does not hold some of them.
template <class Lanes>
INLINE bool write_singles(vf squares, vf peaks, Lanes lanes, double* square, double* peak) {
  const vf given = keep(squares, set1(1.0f), lanes);
  const auto held = (given >= set1(LEAST_SQUARES)) & (given <= set1(MOST_SQUARES));
  if (sum(held ? set1(1.0f) : set1(0.0f)) != static_cast<float>(W)) return false;
  Seen seen;
  doubles(squares, seen.squares);
  doubles(peaks, seen.peaks);
  seen.write(lanes, square, peak);
  return true;
}

// Lane i is one value of all lanes of v[i].
template <class F>
INLINE vf over_lines(vf (&v)[W], const F& both) {
#pragma GCC unroll 4
  for (int half = W / 2; half > 0; half /= 2)
#pragma GCC unroll 8
    for (int m = 0; m < half; ++m) v[m] = both(interleave_low(v[m], v[m + half]), interleave_high(v[m], v[m + half]));
  return v[0];
}

// W rows that lie side by side in memory, from row i; or fewer.
template <class T, class Lanes>
INLINE void look_beside(const LookCall& c, const T* x, int64_t i, Lanes lanes, int64_t end) {
  for (int64_t k = 0; i + LOOKED_BESIDE < end && k < c.count; ++k) __builtin_prefetch(x + i + LOOKED_BESIDE + c.at[k] * c.col);
  double *const square = c.squares + i, *const peak = c.peaks ? c.peaks + i : nullptr;
  SeenSingly single, other;  // in turns: a sum waits for the one before
  int64_t k = 0;
  for (; k + 2 <= c.count; k += 2) {
    single.see(x + i + c.at[k] * c.col, lanes);
    other.see(x + i + c.at[k + 1] * c.col, lanes);
  }
  if (k < c.count) single.see(x + i + c.at[k] * c.col, lanes);
  if (write_singles(single.squares + other.squares, vmax(single.peaks, other.peaks), lanes, square, peak)) return;
  Seen seen;
  for (k = 0; k < c.count; ++k) seen.see(x + i + c.at[k] * c.col, lanes);
  seen.write(lanes, square, peak);
}

// Row i, which is a run of memory; `see` is given parts of it.
template <class T, class F>
INLINE void along(const LookCall& c, const T* x, int64_t i, int64_t end, const F& see) {
  const T* row = x + i * c.row;
  const int64_t ahead = i + LOOKED_AHEAD < end ? LOOKED_AHEAD * c.row : 0;
  int64_t r = 0;
  for (; r + LOOKED_RUN <= c.count; r += LOOKED_RUN) {
    const T* p = row + c.at[r];
    __builtin_prefetch(p + ahead);  // a line of memory or two, that no pattern foretells
    __builtin_prefetch(p + ahead + LOOKED_RUN - 1);
#pragma GCC unroll 4
    for (int64_t k = 0; k < LOOKED_RUN; k += W) see(p + k, All{});
  }
  for (; r < c.count; r += W) see(row + c.at[r], Some{c.count - r < W ? c.count - r : W});
}

// W rows that are runs of memory, from row i; or fewer.
template <class T, class Lanes>
INLINE bool look_along(const LookCall& c, const T* x, int64_t i, Lanes lanes, int64_t end) {
  vf squares[W], peaks[W];
  for (int64_t n = 0; n < W; ++n) {
    SeenSingly seen;
    if (n < lanes_of(lanes)) along(c, x, i + n, end, [&](const T* p, auto lanes) INLINE_LAMBDA { seen.see(p, lanes); });
    squares[n] = seen.squares;
    peaks[n] = seen.peaks;
  }
  const vf all = over_lines(squares, [](vf a, vf b) INLINE_LAMBDA { return a + b; });
  const vf most = c.peaks ? over_lines(peaks, [](vf a, vf b) INLINE_LAMBDA { return vmax(a, b); }) : set1(0.0f);
  return write_singles(all, most, lanes, c.squares + i, c.peaks ? c.peaks + i : nullptr);
}

template <class T>
static void look_of(const LookCall& c, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(c.x);
  for (int64_t i = begin; i < end; i += W) {
    const int64_t last = end - i < W ? end : i + W;
    if (c.row == 1) {
      last - i == W ? look_beside(c, x, i, All{}, end) : look_beside(c, x, i, Some{last - i}, end);
      continue;
    }
    if (c.col == 1 && (last - i == W ? look_along(c, x, i, All{}, end) : look_along(c, x, i, Some{last - i}, end))) continue;
    for (int64_t n = i; n < last; ++n) {
      Seen seen;
      if (c.col == 1)
        along(c, x, n, end, [&](const T* p, auto lanes) INLINE_LAMBDA { seen.see(p, lanes); });
      else
        for (int64_t k = 0; k < c.count; ++k) seen.see(x + n * c.row + c.at[k] * c.col, Some{1});
      seen.write_all(c.squares + n, c.peaks ? c.peaks + n : nullptr);
    }
  }
}

static void look(const LookCall& c, int64_t begin, int64_t end) {
  if (c.wide) return look_of<double>(c, begin, end);
  DISPATCH(c.dtype, T, look_of<T>(c, begin, end))
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
