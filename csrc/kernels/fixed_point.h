// A block of a product in whole numbers: rows of left and columns of right of every panel are scaled to
// so many steps that a sum of products fits into 32 bits, and multiplied as pairs of 16.
#pragma once

#include "kernels/gemm.h"

namespace tensorlogic::TENSORLOGIC_ISA {

constexpr float STEPS = 2364;  // to either side: KC of their squares stay below 2^31
static_assert(STEPS * STEPS * KC < 2147483648.0, "sums of a panel fit into 32 bits");
// A row's largest element over its mean size: beside more, the others have too few steps. Not over the root of the mean square, of
// which a large element is itself the most; nor over a mean of few, for the same reason.
constexpr float CREST = 14, CREST_DEPTH = 8 * CREST;
constexpr float FARTHEST = 0x1p50f;  // of a largest element from 1: products of scales stay in range
constexpr int64_t ENDS = 2;  // rows behind a right panel: its scales, and room

// The factor that brings lanes with these largest elements to steps; false where steps do not do.
INLINE bool steps_of(vf most, vf sizes, int64_t depth, vf& factor, vf& scale) {
  const vf none = set1(0.0f), one = set1(1.0f);
  const float n = static_cast<float>(depth), crest = n < CREST_DEPTH ? n * (CREST / CREST_DEPTH) : CREST;
  const auto empty = sizes == none;
  const vf safe = empty ? one : most;
  const auto good = empty | ((most <= set1(FARTHEST)) & (most >= set1(1 / FARTHEST)) &
                             (most * set1(n) <= set1(crest) * sizes));
  factor = empty ? none : set1(STEPS) / safe;
  scale = safe * set1(1 / STEPS);
  bool all = true;
  for (int lane = 0; lane < W; ++lane) all &= good[lane] != 0;
  return all;
}

// Steps of a right panel [depth, cols <= NR] in its own place, two rows in one, its scales behind them.
template <class Pairs>
static bool steps_down(float* panel, int64_t depth, int64_t cols, int64_t units) {
  bool good = true;
  for (int64_t v = 0; v < cols; v += W) {
    vf most = set1(0.0f), sizes = set1(0.0f), factor, scale;
    for (int64_t k = 0; k < depth; ++k) {
      const vf x = load(panel + k * NR + v, All{});
      most = vmax(vabs(x), most);
      sizes = sizes + vabs(x);
    }
    good &= steps_of(most, sizes, depth, factor, scale);
    for (int64_t k = 0; k < depth; k += 2) {
      const vf low = load(panel + k * NR + v, All{}) * factor;
      const vf high = k + 1 < depth ? load(panel + (k + 1) * NR + v, All{}) * factor : set1(0.0f);
      store(panel + k / 2 * NR + v, Pairs::of(low, high), All{});
    }
    store(panel + units * NR + v, scale, All{});
  }
  return good;
}

// The same of left panels of `each` <= MR rows, neighbours along a row in one; a row's scale is behind its KC elements.
template <class Pairs>
static bool steps_across(float* panels, int64_t rows, int64_t each, int64_t depth) {
  float most[W], sizes[W], factors[W];
  const int64_t even = (depth + 2 * W - 1) / (2 * W) * (2 * W);
  bool good = true;
  auto row = [&](int64_t r) { return panels + (r / each * MR + r % each) * PITCH; };
  for (int64_t r = 0; r < rows; r += W) {
    const int64_t some = least(rows - r, W);
    for (int64_t n = 0; n < W; ++n) {
      vf peak = set1(0.0f), size = set1(0.0f);
      if (n < some) {
        float* x = row(r + n);
        for (int64_t k = depth; k < even; ++k) x[k] = 0.0f;
        for (int64_t k = 0; k < even; k += W) {
          const vf v = load(x + k, All{});
          peak = vmax(vabs(v), peak);
          size = size + vabs(v);
        }
      }
      most[n] = 0.0f;
      for (int lane = 0; lane < W; ++lane) most[n] = peak[lane] > most[n] || peak[lane] != peak[lane] ? peak[lane] : most[n];
      sizes[n] = sum(size);
    }
    vf factor, scale;
    good &= steps_of(load(most, All{}), load(sizes, All{}), depth, factor, scale);
    store(factors, factor, All{});
    for (int64_t n = 0; n < some; ++n) {
      float* x = row(r + n);
      const vf by = set1(factors[n]);
      for (int64_t k = 0; k < even; k += 2 * W) {
        const vf first = load(x + k, All{}) * by, second = load(x + k + W, All{}) * by;
        store(x + k / 2, Pairs::along(first, second), All{});
      }
      x[KC] = scale[n];
    }
  }
  return good;
}

// c[r][0 .. V * W) (+)= scales of r and the column times the sum over pairs k of a[r][k] b[k][0 .. V * W), R rows.
template <class Pairs, int R, int V>
static void steps_tile(const float* a, const float* b, int64_t units, float* c, int64_t pitch, bool add) {
  typename Pairs::Sums acc[R][V];  // not as floats, which compilers would keep in memory
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = Pairs::none();
  if (add)  // as in `tile`
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) __builtin_prefetch(c + r * pitch + v * W, 1, 2);
  for (int64_t k = 0; k < units; ++k) {
    typename Pairs::Sums right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = Pairs::read(b + k * NR + v * W);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto left = Pairs::repeat(a + r * PITCH + k);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] = Pairs::accumulate(left, right[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* to = c + r * pitch + v * W;
      const vf scale = set1(a[r * PITCH + KC]) * load(b + units * NR + v * W, All{});
      const vf sums = Pairs::real(acc[r][v]);
      store(to, add ? fma(sums, scale, load(to, All{})) : sums * scale, All{});
    }
}

template <class Pairs, int V, int... R>
INLINE Tile steps_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr Tile tiles[] = {steps_tile<Pairs, R + 1, V>...};
  return tiles[rows - 1];
}

// As gemm_by; g.coarse is set where numbers do not go into steps, and then c is of no use.
template <class Pairs>
static void gemm_by_steps(const GemmCall& g) {
  constexpr auto all = std::make_integer_sequence<int, MR>{};
  float *left = g.scratch, *right = left + LEFT;
  const int64_t panels = (g.M + MR - 1) / MR, rows = (g.M + panels - 1) / panels;
  const int64_t next = g.all_rows ? g.pitch : 0;
  const bool lines = g.a.row == 1 || g.a.col == 1;
  const int64_t group = g.a.row == 1 && g.a.col != 1 ? GROUP : 1, tiles = (g.N + NR - 1) / NR;
  bool good = true;
  const int64_t times = g.K > g.depth ? (g.K + g.depth - 1) / g.depth : 1;
  const int64_t most = (g.K + 2 * times - 1) / (2 * times) * 2;  // evenly: few elements tell little of their mean size
  for (int64_t k = 0; k == 0 || k < g.K; k += most) {
    const int64_t depth = least(g.K - k, most), units = (depth + 1) / 2, panel = depth + ENDS;
    const int64_t step = g.b.col == 1 ? 16 : depth > 0 ? depth : 1;
    for (int64_t n = 0; n < depth; n += step)
      for (int64_t j = 0; j < g.N; j += NR)
        BySingles::pack_right(g.b, k + n, j, least(depth - n, step), least(g.N - j, NR),
                              right + j * panel + n * NR);
    for (int64_t j = 0; j < g.N; j += NR)
      good &= steps_down<Pairs>(right + j * panel, depth, least(g.N - j, NR), units);
    for (int64_t i = 0; i < g.M && good; i += rows) {
      const int64_t some = least(g.M - i, rows), place = i / rows % group;
      float *c = g.c + i * next, *own = left + place * MR * PITCH;
      if (place == 0) {
        const int64_t many = least(g.M - i, group * rows);
        BySingles::pack_left(g.a, i, k, many, depth, rows, left);
        good &= steps_across<Pairs>(left, many, rows, depth);
      }
      const Tile wide = steps_tile_of<Pairs, 2>(some, all), narrow = steps_tile_of<Pairs, 1>(some, all);
      const int64_t after = i + (group - place) * rows, soon = lines ? least(g.M - after, group * rows) : 0;
      for (int64_t j = 0; j < g.N; j += NR) {
        if (soon > 0) ask(g.a, after, k, soon, depth, place * tiles + j / NR, group * tiles);
        const Tile run = g.N - j > W ? wide : narrow;
        run(own, right + j * panel, units, c + j, g.pitch, k > 0);
      }
      if (k + depth >= g.K) g.done(g.context, c, i, some);
    }
    if (!good) break;
  }
  if (!good) g.coarse->store(true, std::memory_order_relaxed);
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
