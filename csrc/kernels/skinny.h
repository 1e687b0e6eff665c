// Few rows times a matrix: weights are read once, in their own type, at the speed of memory;
// float32 accumulation.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

template <int R, int M, class T>
INLINE void dot_block(const T* w, const float* x, float* y, int64_t K, int64_t N, int64_t step) {
  // Few sums are had in several parts: shorter chains round less and do not wait for each other.
  constexpr int U = R * M >= 8 ? 1 : R * M >= 4 ? 2 : 4;
  vf acc[U][R][M];
  for (int u = 0; u < U; ++u)
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m) acc[u][r][m] = set1(0);
  auto add = [&](int u, int64_t i, auto lanes) __attribute__((always_inline)) {
    vf xs[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) xs[m] = load(x + m * K + i, lanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      if (u == 0 || sizeof(T) == 4) __builtin_prefetch(w + (r + R) * step + i, 0, 2);
      vf v = load(w + r * step + i, lanes);
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) acc[u][r][m] = fma(v, xs[m], acc[u][r][m]);
    }
  };
  int64_t i = 0;
  for (; i + U * W <= K; i += U * W)
#pragma GCC unroll 4
    for (int u = 0; u < U; ++u) add(u, i + u * W, All{});
  for (; i + W <= K; i += W) add(0, i, All{});
  if (i < K) add(0, i, Some{K - i});
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) {
      vf all = acc[0][r][m];
      if constexpr (U == 2) all = all + acc[1][r][m];
      if constexpr (U == 4) all = (all + acc[1][r][m]) + (acc[2][r][m] + acc[3][r][m]);
      y[m * N + r] = sum(all);
    }
}

template <int M, class T>
static void dot_some(const T* w, const float* x, float* y, int64_t K, int64_t N, int64_t step) {
  constexpr int R = W < 16 && M > 2 ? 2 : 4;  // whose sums fit into the registers
  int64_t r = 0;
  for (; r + R <= N; r += R) dot_block<R, M>(w + r * step, x, y + r, K, N, step);
  for (; r < N; ++r) dot_block<1, M>(w + r * step, x, y + r, K, N, step);
}

// y[m, r] = sum_k w[r, k] x[m, k] for w [N, K], its rows `step` elements apart
static void dot_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t M,
                     int64_t N, int64_t step) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(w);
    for (int64_t m = 0; m < M; m += 4) {
      const float* xm = x + m * K;
      float* ym = y + m * N;
      switch (M - m) {
        case 1: dot_some<1>(p, xm, ym, K, N, step); break;
        case 2: dot_some<2>(p, xm, ym, K, N, step); break;
        case 3: dot_some<3>(p, xm, ym, K, N, step); break;
        default: dot_some<4>(p, xm, ym, K, N, step); break;
      }
    }
  })
}

template <int R, class T, class Lanes>
INLINE void axpy_column(const T* w, const float* x, float* y, int64_t K, int64_t M, int64_t N,
                        int64_t step, Lanes lanes) {
  vf v[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) v[r] = load(w + r * step, lanes);
  for (int64_t m = 0; m < M; ++m) {
    vf a = load(y + m * N, lanes), b = set1(0);
#pragma GCC unroll 8
    for (int r = 0; r < R; r += 2) {
      a = fma(v[r], set1(x[m * K + r]), a);
      if (r + 1 < R) b = fma(v[r + 1], set1(x[m * K + r + 1]), b);
    }
    store(y + m * N, a + b, lanes);
  }
}

template <int R, class T>
static void axpy_some(const T* w, const float* x, float* y, int64_t K, int64_t M, int64_t N,
                      int64_t step) {
  int64_t j = 0;
  for (; j + W <= N; j += W) axpy_column<R>(w + j, x, y + j, K, M, N, step, All{});
  if (j < N) axpy_column<R>(w + j, x, y + j, K, M, N, step, Some{N - j});
}

constexpr int64_t SOME_ROWS = 7;  // from which sums stay in registers over a block of rows of w: fewer wait for memory
constexpr int64_t MOST_ROWS = 16, ROWS_DEPTH = 64;  // each of a block's rows may lie in a page of its own
constexpr int ROWS_EACH = W < 16 ? 6 : 16;  // rows of a tile of sums, two vectors wide where registers hold them

// y[r, 0 .. V * W) += sum_k x[k, r] w[k, 0 .. V * W), R columns of x [depth, MOST_ROWS]
template <int R, int V, class T, class Lanes>
INLINE void rows_tile(const T* w, const float* x, float* y, int64_t depth, int64_t N, int64_t step,
                      Lanes lanes) {
  vf acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    vf right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) right[v] = load(w + k * step + v * W, lanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const vf left = set1(x[k * MOST_ROWS + r]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) acc[r][v] = fma(left, right[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      float* to = y + r * N + v * W;
      store(to, load(to, lanes) + acc[r][v], lanes);
    }
}

// The same for all columns
template <int R, class T>
static void rows_some(const T* w, const float* x, float* y, int64_t depth, int64_t N, int64_t step) {
  constexpr int V = W < 16 || R <= 8 ? 2 : 1;
  int64_t j = 0;
  for (; j + V * W <= N; j += V * W) rows_tile<R, V>(w + j, x, y + j, depth, N, step, All{});
  for (; j + W <= N; j += W) rows_tile<R, 1>(w + j, x, y + j, depth, N, step, All{});
  if (j < N) rows_tile<R, 1>(w + j, x, y + j, depth, N, step, Some{N - j});
}

template <class T>
using RowsSome = void (*)(const T*, const float*, float*, int64_t, int64_t, int64_t);
template <class T, int... R>
INLINE RowsSome<T> rows_of(int64_t rows, std::integer_sequence<int, R...>) {
  static constexpr RowsSome<T> some[] = {rows_some<R + 1, T>...};
  return some[rows - 1];
}

// As axpy_rows, for SOME_ROWS to MOST_ROWS rows of x.
template <class T>
static void rows_in_registers(const T* w, const float* x, float* y, int64_t K, int64_t M, int64_t N,
                              int64_t step) {
  constexpr auto all = std::make_integer_sequence<int, ROWS_EACH>{};
  const int64_t parts = (M + ROWS_EACH - 1) / ROWS_EACH, each = (M + parts - 1) / parts;
  float turned[ROWS_DEPTH * MOST_ROWS];
  for (int64_t k = 0; k < K; k += ROWS_DEPTH) {
    const int64_t depth = least(K - k, ROWS_DEPTH);
    turn(Singles<float>{x + k, 1, K}, depth, M, [&](int64_t i) { return turned + i * MOST_ROWS; });
    for (int64_t m = 0; m < M; m += each)
      rows_of<T>(least(M - m, each), all)(w + k * step, turned + m, y + m * N, depth, N, step);
  }
}

// y[m, j] += sum_k x[m, k] w[k, j] for w [K, N], its rows `step` elements apart, eight at a time
static void axpy_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t M,
                      int64_t N, int64_t step) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(w);
    if (M >= SOME_ROWS && M <= MOST_ROWS) return rows_in_registers(p, x, y, K, M, N, step);
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) axpy_some<8>(p + k * step, x + k, y, K, M, N, step);
    for (; k < K; ++k) axpy_some<1>(p + k * step, x + k, y, K, M, N, step);
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
