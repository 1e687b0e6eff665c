// A block of a product in float32: operands of any type and layout are packed into panels that stay
// in the caches, and a tile of sums stays in registers over the whole depth of a panel.
#pragma once

#include <utility>

namespace tensorlogic::TENSORLOGIC_ISA {

constexpr int NR = 2 * W;           // columns of a tile
constexpr int64_t PITCH = KC + 16;  // from row to row of a left panel: not a power of two

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
  INLINE_MEMBER vf along_column(int64_t i, int64_t j) const { return load(p + i + j * sj, All{}); }
  INLINE_MEMBER float unit(int64_t i, int64_t j) const {
    if constexpr (sizeof(T) == sizeof(float))
      return p[i * si + j * sj];
    else
      return load(p + i * si + j * sj, Some{1})[0];
  }
};

// dst[n * pitch + m] = unit (i + n, j + m), n < W, m < W: a square turned in registers.
template <class S>
INLINE void turn_square(const S& s, int64_t i, int64_t j, float* dst, int64_t pitch) {
  vf r[W], t[W];
#pragma GCC unroll 16
  for (int m = 0; m < W; ++m) r[m] = s.along_column(i, j + m);
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
  for (int n = 0; n < W; ++n) store(dst + n * pitch, r[n], All{});
}

// dst[i * pitch + j] = unit (i, j) for i < rows, j < cols; columns up to `padded` become 0.
template <class S>
static void pack_panel(const S s, int64_t rows, int64_t cols, int64_t padded, float* dst,
                       int64_t pitch) {
  int64_t whole = 0;
  if (s.across()) {
    for (int64_t i = 0; i < rows; ++i) {
      float* to = dst + i * pitch;
      int64_t j = 0;
      for (; j + W <= cols; j += W) store(to + j, s.along_row(i, j, All{}), All{});
      if (j < cols) {
        Some lanes{cols - j};
        store(to + j, s.along_row(i, j, lanes), lanes);
      }
    }
    whole = cols;
  } else if (s.down()) {
    whole = cols / W * W;
    for (int64_t j = 0; j < whole; j += W) {
      int64_t i = 0;
      for (; i + W <= rows; i += W) turn_square(s, i, j, dst + i * pitch + j, pitch);
      for (; i < rows; ++i)
        for (int64_t m = j; m < j + W; ++m) dst[i * pitch + m] = s.unit(i, m);
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = whole; j < cols; ++j) dst[i * pitch + j] = s.unit(i, j);
    for (int64_t j = cols; j < padded; ++j) dst[i * pitch + j] = 0.0f;
  }
}

// Products of float32 units, whatever the operands' types.
struct BySingles {
  static constexpr int64_t elements = 1;  // of the inner dimension a unit
  INLINE_MEMBER static vf accumulate(vf left, vf right, vf acc) { return fma(left, right, acc); }
  INLINE_MEMBER static void pack_left(const Matrix& m, int64_t i, int64_t k, int64_t rows,
                                      int64_t depth, float* dst) {
    pack(m, i, k, rows, depth, depth, dst, PITCH);
  }
  INLINE_MEMBER static void pack_right(const Matrix& m, int64_t k, int64_t j, int64_t depth,
                                       int64_t cols, float* dst) {
    pack(m, k, j, depth, cols, NR, dst, NR);
  }

 private:
  INLINE_MEMBER static void pack(const Matrix& m, int64_t i, int64_t j, int64_t rows, int64_t cols,
                                 int64_t padded, float* dst, int64_t pitch) {
    DISPATCH(m.dtype, T, {
      const T* p = static_cast<const T*>(m.data) + i * m.row + j * m.col;
      pack_panel(Singles<T>{p, m.row, m.col}, rows, cols, padded, dst, pitch);
    })
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

// The right panels of a block are as deep as one of eight tiles' width may be.
[[maybe_unused]] static int64_t gemm_scratch(int64_t N) {
  const int64_t width = (N + NR - 1) / NR * NR;
  return MR * PITCH + KC * least(width, 8 * NR);
}

template <class Units>
static void gemm_by(const GemmCall& g) {
  constexpr int64_t E = Units::elements;
  constexpr auto all = std::make_integer_sequence<int, MR>{};
  float *left = g.scratch, *right = left + MR * PITCH;
  const int64_t panels = (g.M + MR - 1) / MR, rows = (g.M + panels - 1) / panels;
  const int64_t most = least(KC, KC * 8 * NR / ((g.N + NR - 1) / NR * NR)) * E;
  for (int64_t k = 0; k == 0 || k < g.K; k += most) {
    const int64_t depth = least(g.K - k, most), units = (depth + E - 1) / E;
    // Where rows are contiguous, a few of them for all panels: each page of memory is visited once.
    const int64_t step = g.b.col == 1 ? 16 : depth > 0 ? depth : 1;
    for (int64_t n = 0; n < depth; n += step)
      for (int64_t j = 0; j < g.N; j += NR)
        Units::pack_right(g.b, k + n, j, least(depth - n, step), least(g.N - j, NR),
                          right + j * units + n / E * NR);
    for (int64_t i = 0; i < g.M; i += rows) {
      const int64_t some = least(g.M - i, rows);
      Units::pack_left(g.a, i, k, some, depth, left);
      const Tile wide = tile_of<Units, 2>(some, all), narrow = tile_of<Units, 1>(some, all);
      for (int64_t j = 0; j < g.N; j += NR) {
        const Tile run = g.N - j > W ? wide : narrow;
        run(left, right + j * units, units, g.c + i * g.pitch + j, g.pitch, k > 0);
      }
    }
  }
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
