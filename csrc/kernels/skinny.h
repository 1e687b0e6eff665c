// Few rows times a matrix: weights are read once, in their own type, at the speed of memory;
// float32 accumulation.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

// Nothing is asked for ahead: in four rows at a time the processor sees what comes, and requests of ours take a fifth of the second-level cache's rate.
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
  constexpr int SUMS = R * M;
  vf all[SUMS < W ? W : SUMS];
#pragma GCC unroll 16
  for (int n = 0; n < SUMS; ++n) {
    const int r = n % R, m = n / R;
    all[n] = acc[0][r][m];
    if constexpr (U == 2) all[n] = all[n] + acc[1][r][m];
    if constexpr (U == 4) all[n] = (all[n] + acc[1][r][m]) + (acc[2][r][m] + acc[3][r][m]);
  }
  float to[W];
  constexpr bool together = SUMS <= W && 2 * SUMS > W;
  if constexpr (together) {
#pragma GCC unroll 16
    for (int n = SUMS; n < W; ++n) all[n] = set1(0.0f);
    store(to, sums(all), All{});
  }
#pragma GCC unroll 16
  for (int n = 0; n < SUMS; ++n) y[n / R * N + n % R] = together ? to[n] : sum(all[n]);
}

// The first n columns of y, whose rows are N apart.
template <int M, class T>
static void dot_some(const T* w, const float* x, float* y, int64_t K, int64_t n, int64_t N, int64_t step) {
  constexpr int R = W < 16 && M > 3 ? 3 : 4;  // as many sums as registers hold: 12 of 16, 16 of 32
  int64_t r = 0;
  for (; r + R <= n; r += R) dot_block<R, M>(w + r * step, x, y + r, K, N, step);
  for (; r < n; ++r) dot_block<1, M>(w + r * step, x, y + r, K, N, step);
}

template <class T>
INLINE void dots(int64_t rows, const T* w, const float* x, float* y, int64_t K, int64_t n, int64_t N, int64_t step) {
  switch (rows) {
    case 1: return dot_some<1>(w, x, y, K, n, N, step);
    case 2: return dot_some<2>(w, x, y, K, n, N, step);
    case 3: return dot_some<3>(w, x, y, K, n, N, step);
    default: return dot_some<4>(w, x, y, K, n, N, step);
  }
}

constexpr int64_t WEIGHTS_KEPT = 256 << 10;  // bytes, about, that all rows of x meet while they lie in the second-level cache

// y[m, r] = sum_k w[r, k] x[m, k] for w [N, K], its rows `step` elements apart
static void dot_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t M,
                     int64_t N, int64_t step) {
  DISPATCH(dtype, T, {
    const int64_t some = (WEIGHTS_KEPT / static_cast<int64_t>(K * sizeof(T) + 1) / DOTS + 1) * DOTS;
    for (int64_t n = 0; n < N; n += some)
      for (int64_t m = 0; m < M; m += 4)
        dots(least(M - m, 4), static_cast<const T*>(w) + n * step, x + m * K, y + m * N + n, K,
             least(N - n, some), N, step);
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
template <class T>  // rows of a tile of sums; two vectors wide where registers hold them
constexpr int ROWS_EACH = W < 16 ? 6 : sizeof(T) < sizeof(float) ? 8 : 16;

// y[r, 0 .. V * W) += sum_k x[k, r] w[k, 0 .. V * W), R columns of x [depth, MOST_ROWS]; w in float32 goes to `kept` if it is given.
template <int R, int V, bool keeps, class T, class Lanes>
static void rows_tile(const T* w, const float* x, float* y, float* kept, int64_t depth, int64_t N,
                      int64_t step, Lanes lanes) {
  vf acc[R][V];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) acc[r][v] = set1(0.0f);
  for (int64_t k = 0; k < depth; ++k) {
    vf right[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      right[v] = load(w + k * step + v * W, lanes);
      if constexpr (keeps) store(kept + (k * V + v) * W, right[v], All{});
    }
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

template <int V, bool keeps, class T, class Lanes, int... R>
INLINE auto rows_tile_of(int64_t rows, std::integer_sequence<int, R...>) {
  using Rows = void (*)(const T*, const float*, float*, float*, int64_t, int64_t, int64_t, Lanes);
  static constexpr Rows some[] = {rows_tile<R + 1, V, keeps, T, Lanes>...};
  return some[rows - 1];
}

// A strip of V * W columns, or its first `lanes`, for M rows of x, `each` at a time: the first of them widen it, the others find it in the cache.
template <int V, class T, class Lanes>
INLINE void rows_strip(const T* w, const float* x, float* y, int64_t each, int64_t depth, int64_t M,
                       int64_t N, int64_t step, Lanes lanes) {
  constexpr auto all = std::make_integer_sequence<int, (V > 1 && W >= 16 ? 8 : ROWS_EACH<T>)>{};
  if (each >= M) return rows_tile_of<V, false, T, Lanes>(M, all)(w, x, y, nullptr, depth, N, step, lanes);
  alignas(64) float kept[ROWS_DEPTH * V * W];
  rows_tile_of<V, true, T, Lanes>(each, all)(w, x, y, kept, depth, N, step, lanes);
  for (int64_t m = each; m < M; m += each)
    rows_tile_of<V, false, float, Lanes>(least(M - m, each), all)(kept, x + m, y + m * N, nullptr,
                                                                  depth, N, V * W, lanes);
}

// As axpy_rows, for SOME_ROWS to MOST_ROWS rows of x.
template <class T>
static void rows_in_registers(const T* w, const float* x, float* y, int64_t K, int64_t M, int64_t N,
                              int64_t step) {
  const int64_t parts = (M + ROWS_EACH<T> - 1) / ROWS_EACH<T>, each = (M + parts - 1) / parts;
  const bool two = W < 16 || each <= 8;  // vectors a row
  float turned[ROWS_DEPTH * MOST_ROWS];
  for (int64_t k = 0; k < K; k += ROWS_DEPTH) {
    const int64_t depth = least(K - k, ROWS_DEPTH);
    turn(Singles<float>{x + k, 1, K}, depth, M, [&](int64_t i) { return turned + i * MOST_ROWS; });
    const T* p = w + k * step;
    int64_t j = 0;
    if (two)
      for (; j + 2 * W <= N; j += 2 * W) rows_strip<2>(p + j, turned, y + j, each, depth, M, N, step, All{});
    for (; j + W <= N; j += W) rows_strip<1>(p + j, turned, y + j, each, depth, M, N, step, All{});
    if (j < N) rows_strip<1>(p + j, turned, y + j, each, depth, M, N, step, Some{N - j});
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
