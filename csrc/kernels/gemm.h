// A block of a product in float32: operands of any type and layout are packed into panels that stay
// in the caches, and a tile of sums stays in registers over the whole depth of a panel.
#pragma once

#include <utility>

#include "thread_pool.h"

namespace tensorlogic::TENSORLOGIC_ISA {

constexpr int NR = 2 * W;           // columns of a tile
constexpr int64_t PITCH = KC + 16;  // from row to row of a left panel: not a power of two
constexpr int64_t GROUP = W / 2;  // left panels that are whole squares of W rows together: turned from columns at a time
constexpr int64_t LEFT = GROUP * MR * PITCH;

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// What panels are made of: 32-bit units, here one element each. Unit (i, j) is element (i, j).
template <class T>
struct Singles {
  const T* p;
  int64_t si, sj;
  bool across() const { return sj == 1; }  // neighbours along j lie side by side
  bool down() const { return si == 1; }
  template <class Lanes>
  INLINE_MEMBER vf along_row(int64_t i, int64_t j, Lanes lanes) const {
    return load(p + i * si + j, lanes);
  }
  template <class Lanes>
  INLINE_MEMBER vf along_column(int64_t i, int64_t j, Lanes lanes) const {
    return load(p + i + j * sj, lanes);
  }
  INLINE_MEMBER float unit(int64_t i, int64_t j) const {
    if constexpr (sizeof(T) == sizeof(float))
      return p[i * si + j * sj];
    else
      return load(p + i * si + j * sj, Some{1})[0];
  }
};

// to(n)[m] = unit (i + n, j + m) for n < rows, m < cols, both at most W: a square turned in
// registers; the rest of each row of W becomes 0.
template <class S, class Lanes, class Rows>
INLINE void turn_square(const S& s, int64_t i, int64_t j, Lanes lanes, int64_t rows, int64_t cols,
                        Rows to) {
  vf r[W], t[W];
#pragma GCC unroll 16
  for (int m = 0; m < W; ++m) r[m] = m < cols ? s.along_column(i, j + m, lanes) : set1(0.0f);
#pragma GCC unroll 4
  for (int round = 1; round < W; round *= 2) {
#pragma GCC unroll 8
    for (int m = 0; m < W / 2; ++m) {
      t[2 * m] = interleave_low(r[m], r[m + W / 2]);
      t[2 * m + 1] = interleave_high(r[m], r[m + W / 2]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < W; ++m) r[m] = t[m];
  }
#pragma GCC unroll 16
  for (int n = 0; n < W; ++n)
    if (n < rows) store(to(n), r[n], All{});
}

// to(i)[j] = unit (i, j) for i < rows, j < cols, neighbours along i side by side; columns up to the next multiple of W become 0.
template <class S, class Rows>
INLINE void turn(const S& s, int64_t rows, int64_t cols, Rows to) {
  for (int64_t j = 0; j < cols; j += W) {
    const int64_t n = least(cols - j, W);
    for (int64_t i = 0; i < rows; i += W) {
      const int64_t m = least(rows - i, W);
      auto row = [=](int64_t r) { return to(i + r) + j; };
      if (m == W && n == W)
        turn_square(s, i, j, All{}, W, W, row);
      else if (m == W)
        turn_square(s, i, j, All{}, W, n, row);
      else
        turn_square(s, i, j, Some{m}, m, n, row);
    }
  }
}

// dst[i * pitch + j] = unit (i, j) for i < rows, j < cols; columns up to the next multiple of W become 0.
template <class S>
static void pack_panel(const S s, int64_t rows, int64_t cols, float* dst, int64_t pitch) {
  if (s.across()) {
    for (int64_t i = 0; i < rows; ++i) {
      float* to = dst + i * pitch;
      int64_t j = 0;
      for (; j + W <= cols; j += W) store(to + j, s.along_row(i, j, All{}), All{});
      if (j < cols) {
        Some lanes{cols - j};
        store(to + j, keep(s.along_row(i, j, lanes), set1(0.0f), lanes), All{});
      }
    }
  } else if (s.down()) {
    turn(s, rows, cols, [=](int64_t i) { return dst + i * pitch; });
  } else {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < (cols + W - 1) / W * W; ++j)
        dst[i * pitch + j] = j < cols ? s.unit(i, j) : 0.0f;
  }
}

// A left operand in panels of `each` <= MR rows, GROUP of them at most; one alone unless its columns are runs of memory.
template <class S>
static void pack_panels(const S s, int64_t rows, int64_t cols, int64_t each, float* dst) {
  if (rows <= each) return pack_panel(s, rows, cols, dst, PITCH);
  int64_t from[GROUP * MR];
  for (int64_t i = 0; i < rows; ++i) from[i] = (i / each * MR + i % each) * PITCH;
  turn(s, rows, cols, [&](int64_t i) { return dst + from[i]; });
}

// Products of float32 units, whatever the operands' types.
struct BySingles {
  static constexpr int64_t elements = 1;  // of the inner dimension a unit
  INLINE_MEMBER static vf accumulate(vf left, vf right, vf acc) { return fma(left, right, acc); }
  INLINE_MEMBER static void pack_left(const Matrix& m, int64_t i, int64_t k, int64_t rows,
                                      int64_t depth, int64_t each, float* dst) {
    DISPATCH_WIDE(m.dtype, T, pack_panels(units<T>(m, i, k), rows, depth, each, dst))
  }
  INLINE_MEMBER static void pack_right(const Matrix& m, int64_t k, int64_t j, int64_t depth,
                                       int64_t cols, float* dst) {
    DISPATCH_WIDE(m.dtype, T, pack_panel(units<T>(m, k, j), depth, cols, dst, NR))
  }

 private:
  template <class T>
  INLINE_MEMBER static Singles<T> units(const Matrix& m, int64_t i, int64_t j) {
    return {static_cast<const T*>(m.data) + i * m.row + j * m.col, m.row, m.col};
  }
};

// c[r][0 .. V * W) (+)= sum over units k of a[r][k] b[k][0 .. V * W), R rows.
template <class Units, int R, int V>
static void tile(const float* a, const float* b, int64_t units, float* c, int64_t pitch, bool add) {
  vf acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
  if (W >= 16 && add)  // the sums of the panels before, on their way while this one is multiplied; AVX2 gains nothing
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) __builtin_prefetch(c + r * pitch + v * W, 1, 2);
  for (int64_t k = 0; k < units; ++k) {
    vf right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = load(b + k * NR + v * W, All{});
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      vf left = set1(a[r * PITCH + k]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] = Units::accumulate(left, right[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* to = c + r * pitch + v * W;
      store(to, add ? load(to, All{}) + acc[r][v] : acc[r][v], All{});
    }
}

using Tile = void (*)(const float*, const float*, int64_t, float*, int64_t, bool);
template <class Units, int V, int... R>
INLINE Tile tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr Tile tiles[] = {tile<Units, R + 1, V>...};
  return tiles[rows - 1];
}

[[maybe_unused]] static int64_t gemm_scratch(int64_t N, int64_t depth) {
  return LEFT + (depth + 2) * ((N + NR - 1) / NR * NR);
}

// Asks for share `t` of `shares` of the next left panels: rows i to i + rows, columns k to k + depth of m.
static void ask(const Matrix& m, int64_t i, int64_t k, int64_t rows, int64_t depth, int64_t t,
                int64_t shares) {
  constexpr int64_t LINE = 64;
  const bool along = m.col == 1;
  const int64_t size = item_size(m.dtype), runs = along ? rows : depth, step = (along ? m.row : m.col) * size;
  const int64_t bytes = (along ? depth : rows) * size, end = runs * (t + 1) / shares;
  const char* at = static_cast<const char*>(m.data) + (i * m.row + k * m.col) * size;
  for (int64_t r = runs * t / shares; r < end; ++r) {
    for (int64_t n = 0; n < bytes; n += LINE) __builtin_prefetch(at + r * step + n, 0, 2);
    if (!along) __builtin_prefetch(at + r * step + bytes - 1, 0, 2);
  }
}

// Asks for elements j to j + cols of rows i to i + rows, which are runs of memory.
INLINE void ask_runs(const Matrix& m, int64_t i, int64_t j, int64_t rows, int64_t cols) {
  constexpr int64_t LINE = 64;
  const int64_t size = item_size(m.dtype);
  const char* at = static_cast<const char*>(m.data) + (i * m.row + j) * size;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < cols * size; n += LINE) __builtin_prefetch(at + r * m.row * size + n, 0, 2);
}

// Rows of a block in groups of left panels, that meet the right panels of one depth after the other.
template <class Units>
struct Groups {
  static constexpr int64_t E = Units::elements;
  const GemmCall& g;
  const int64_t panels = (g.M + MR - 1) / MR, rows = (g.M + panels - 1) / panels;
  const int64_t each = (g.a.row == 1 && g.a.col != 1 ? GROUP : 1) * rows, count = (g.M + each - 1) / each;
  const int64_t most = g.depth * E, tiles = (g.N + NR - 1) / NR;
  const bool asks = g.a.row == 1 || g.a.col == 1;
  float *const left = g.own ? g.own : g.scratch, *const right = g.scratch + LEFT;
  float* const c = g.own && !g.all_rows ? left + LEFT : g.c;

  INLINE_MEMBER int64_t depth(int64_t k) const { return least(g.K - k, most); }
  static INLINE_MEMBER int64_t units(int64_t depth) { return (depth + E - 1) / E; }
  void pack_right(int64_t k) const {
    const int64_t deep = depth(k), of = units(deep);
    // Where rows are contiguous, a few of them for all panels: each page of memory is visited once.
    const int64_t step = g.b.col == 1 ? 16 : deep > 0 ? deep : 1;
    for (int64_t n = 0; n < deep; n += step)
      for (int64_t j = 0; j < g.N; j += NR) {
        const int64_t cols = least(g.N - j, NR), after = n + 2 * step;
        if (g.b.col == 1) ask_runs(g.b, k + after, j, least(deep - after, step), cols);
        Units::pack_right(g.b, k + n, j, least(deep - n, step), cols, right + j * of + n / E * NR);
      }
  }
  void run(int64_t group, int64_t k) const {
    constexpr auto all = std::make_integer_sequence<int, MR>{};
    const int64_t deep = depth(k), of = units(deep), first = group * each, end = least(first + each, g.M);
    Units::pack_left(g.a, first, k, end - first, deep, rows, left);
    const int64_t soon = asks ? least(g.M - end, each) : 0, shares = (end - first + rows - 1) / rows * tiles;
    int64_t share = 0;
    for (int64_t i = first; i < end; i += rows) {
      const int64_t some = least(end - i, rows);
      const float* panel = left + (i - first) / rows * MR * PITCH;
      float* to = c + (g.all_rows ? i * g.pitch : 0);
      const Tile wide = tile_of<Units, 2>(some, all), narrow = tile_of<Units, 1>(some, all);
      for (int64_t j = 0; j < g.N; j += NR, ++share) {
        if (soon > 0) ask(g.a, end, k, soon, deep, share, shares);
        const Tile run = g.N - j > W ? wide : narrow;
        run(panel, right + j * of, of, to + j, g.pitch, k > 0);
      }
      if (k + deep >= g.K) g.done(g.context, to, i, some);
    }
  }
  // Those that nobody else takes, from `taken` on.
  void take(uint64_t taken) const {
    for (; taken; taken = g.share->take()) {
      run(Share::group(taken), Share::panel(taken) * most);
      g.share->done();
    }
  }
};

template <class Units>
static void gemm_by(const GemmCall& g) {
  const Groups<Units> groups{g};
  if (g.own) return groups.take(g.taken);
  for (int64_t k = 0; k == 0 || k < g.K; k += groups.most) {
    groups.pack_right(k);
    if (g.share) {
      g.share->open(&g, k / groups.most, groups.count, k + groups.most >= g.K);
      groups.take(g.share->take());
      for (int64_t turn = 0; !g.share->all_done(); ++turn) crew::pause(turn);
    } else {
      for (int64_t n = 0; n < groups.count; ++n) groups.run(n, k);
    }
  }
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
