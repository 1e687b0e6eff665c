// What a guard of precision looks at: norms and peaks of rows, by a sketch of their elements, summed in
// float64 so that no range of float32 spoils them.
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
  INLINE_MEMBER void add(const Seen& other) {
    for (int h = 0; h < 2; ++h) {
      squares[h] += other.squares[h];
      peaks[h] = vmax(other.peaks[h], peaks[h]);
    }
  }
  template <class Lanes>
  INLINE_MEMBER void add(Lanes lanes, double* square, double* peak) const {
    const size_t bytes = static_cast<size_t>(lanes_of(lanes)) * sizeof(double);
    Seen all{};
    memcpy(all.squares, square, bytes);
    memcpy(all.peaks, peak, bytes);
    all.add(*this);
    memcpy(square, all.squares, bytes);
    memcpy(peak, all.peaks, bytes);
  }
  INLINE_MEMBER void all(double& square, double& peak) const {
    square += over_lanes(squares[0] + squares[1], [](auto a, auto b) { return a + b; });
    const auto larger = [](auto a, auto b) { return a > b ? a : b; };
    const double mine = over_lanes(vmax(peaks[0], peaks[1]), larger);
    peak = mine > peak ? mine : peak;
  }
};

template <class T, class Lanes>
INLINE void look_beside(const LookCall& c, const T* x, int64_t i, Lanes lanes, int64_t end) {
  for (int64_t k = 0; i + LOOKED_BESIDE < end && k < c.count; ++k) __builtin_prefetch(x + i + LOOKED_BESIDE + c.at[k] * c.col);
  Seen seen, other;  // in turns: a sum waits for the one before
  int64_t k = 0;
  for (; k + 2 <= c.count; k += 2) {
    seen.see(x + i + c.at[k] * c.col, lanes);
    other.see(x + i + c.at[k + 1] * c.col, lanes);
  }
  if (k < c.count) seen.see(x + i + c.at[k] * c.col, lanes);
  seen.add(other);
  seen.add(lanes, c.squares + i, c.peaks + i);
}

template <class T>
static void look_of(const LookCall& c, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(c.x);
  if (c.row == 1) {  // rows side by side in memory: W of them at once
    int64_t i = begin;
    for (; i + W <= end; i += W) look_beside(c, x, i, All{}, end);
    if (i < end) look_beside(c, x, i, Some{end - i}, end);
    return;
  }
  const int64_t run = c.col == 1 ? LOOKED_RUN : 1;
  for (int64_t i = begin; i < end; ++i) {
    Seen seen;
    for (int64_t r = 0; r < c.count; r += run) {
      const T* p = x + i * c.row + c.at[r] * c.col;
      const int64_t n = c.count - r < run ? c.count - r : run;
      if (c.col == 1 && i + LOOKED_AHEAD < end) {  // a run is a line of memory or two, that no pattern foretells
        __builtin_prefetch(p + LOOKED_AHEAD * c.row);
        __builtin_prefetch(p + LOOKED_AHEAD * c.row + n - 1);
      }
      int64_t k = 0;
      for (; k + W <= n; k += W) seen.see(p + k, All{});
      if (k < n) seen.see(p + k, Some{n - k});
    }
    seen.all(c.squares[i], c.peaks[i]);
  }
}

static void look(const LookCall& c, int64_t begin, int64_t end) {
  if (c.wide) return look_of<double>(c, begin, end);
  DISPATCH(c.dtype, T, look_of<T>(c, begin, end))
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
