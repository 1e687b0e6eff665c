// What a guard of precision looks at: norms and peaks of rows, by a sketch of their elements, summed in
// float64 so that no range of float32 spoils them.
#pragma once

#include <string.h>

namespace tensorlogic::TENSORLOGIC_ISA {

typedef double vd __attribute__((vector_size(sizeof(vf))));
typedef int64_t vl __attribute__((vector_size(sizeof(vf))));
typedef float vf_half __attribute__((vector_size(sizeof(vf) / 2)));
constexpr int HALF = W / 2;
constexpr int64_t LOOKED_RUN = 16;  // places of a sketch that lie side by side
constexpr int64_t LOOKED_AHEAD = 12;       // rows that are fetched before they are looked at

INLINE int64_t lanes_of(All) { return W; }
INLINE int64_t lanes_of(Some lanes) { return lanes.n; }

template <class T, class Lanes>
INLINE void as_doubles(const T* p, Lanes lanes, vd (&to)[2]) {
  const vf v = keep(load(p, lanes), set1(0.0f), lanes);
  vf_half halves[2];
  memcpy(halves, &v, sizeof v);
  to[0] = __builtin_convertvector(halves[0], vd);
  to[1] = __builtin_convertvector(halves[1], vd);
}
template <class Lanes>
INLINE void as_doubles(const double* p, Lanes lanes, vd (&to)[2]) {
  to[0] = to[1] = vd{};
  memcpy(to, p, static_cast<size_t>(lanes_of(lanes)) * sizeof(double));
}

// Norms and peaks of W rows, or of one row by W columns.
struct Seen {
  vd squares[2] = {}, peaks[2] = {};
  template <class T, class Lanes>
  INLINE_MEMBER void see(const T* p, Lanes lanes) {
    vd v[2];
    as_doubles(p, lanes, v);
    for (int h = 0; h < 2; ++h) {
      squares[h] += v[h] * v[h];
      const vd size = reinterpret_cast<vd>(reinterpret_cast<vl>(v[h]) & 0x7fffffffffffffff);
      peaks[h] = size > peaks[h] ? size : peaks[h];  // a NaN shows in the squares
    }
  }
  INLINE_MEMBER void add(int64_t lane, double& square, double& peak) const {
    square += squares[lane / HALF][lane % HALF];
    const double mine = peaks[lane / HALF][lane % HALF];
    peak = mine > peak ? mine : peak;
  }
  INLINE_MEMBER void all(double& square, double& peak) const {  // lanes by halves: a chain of additions takes as long as the memory
    double sums[W], most[W];
    memcpy(sums, squares, sizeof sums);
    memcpy(most, peaks, sizeof most);
#pragma GCC unroll 4
    for (int half = HALF; half > 0; half /= 2)
#pragma GCC unroll 8
      for (int m = 0; m < half; ++m) {
        sums[m] += sums[m + half];
        most[m] = most[m + half] > most[m] ? most[m + half] : most[m];
      }
    square += sums[0];
    peak = most[0] > peak ? most[0] : peak;
  }
};

template <class T, class Lanes>
INLINE void look_beside(const LookCall& c, const T* x, int64_t i, Lanes lanes) {
  Seen seen;
  for (int64_t k = 0; k < c.count; ++k) seen.see(x + i + c.at[k] * c.col, lanes);
  for (int64_t m = 0; m < lanes_of(lanes); ++m) seen.add(m, c.squares[i + m], c.peaks[i + m]);
}

template <class T>
static void look_of(const LookCall& c, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(c.x);
  if (c.row == 1) {  // rows side by side in memory: W of them at once
    int64_t i = begin;
    for (; i + W <= end; i += W) look_beside(c, x, i, All{});
    if (i < end) look_beside(c, x, i, Some{end - i});
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
