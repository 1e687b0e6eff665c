// Few rows times a matrix: weights are read once, in their own type, at the speed of memory;
// float32 accumulation.
#pragma once

#include <chrono>

namespace tensorlogic::TENSORLOGIC_ISA {

// Far halves are asked for ahead of their use, in the order in which they lie: the next 8 KiB where rows are met one by one, else the next
// rows, a line of them for each line used. With less ahead they come too late, with more they leave the first cache before. Near ones lose up
// to a third by it, float32, whose lines are used half as fast, gains little. Sums are the same.
constexpr int64_t LINE = 64, ASKED = 8 << 10;  // bytes
constexpr int64_t NEAR_X = 6144;  // elements of x that stay in the first cache beside what was asked for

// Where weights lie, nobody says: run(begin, end, far) takes `each` near and far, timed once what the other way left behind is used up, and
// the rest the way that was faster.
constexpr int64_t FEWEST = 6;  // times `each` that are worth it
template <class F>
static void paced(int64_t count, int64_t each, const F& run) {
  if (count < FEWEST * each) return run(0, count, false);
  auto timed = [&](int64_t from, bool far) {
    run(from, from + each, far);
    const auto begin = std::chrono::steady_clock::now();
    run(from + each, from + 2 * each, far);
    return std::chrono::steady_clock::now() - begin;
  };
  const auto near = timed(0, false), far = timed(2 * each, true);
  run(4 * each, count, far < near);
}
// Rows of so many bytes that are worth a look at the clock, a multiple of `unit`.
INLINE int64_t paced_rows(int64_t bytes, int64_t unit) { return ((64 << 10) / (bytes * unit + 1) + 1) * unit; }

template <class T>
struct Ahead {  // a walk along rows, line by line
  const T* at;
  int64_t left, row, gap;  // elements of this row, of any, and between two
  INLINE_MEMBER void ask() {
    __builtin_prefetch(at);
    at += LINE / sizeof(T);
    left -= LINE / sizeof(T);
    if (left > 0) return;
    at += left + gap;
    left = row;
  }
};

constexpr int ALONE = W < 16 ? 2 : 4;  // parts of a sum for one row of x, however many rows of w it meets: registers hold four times as many

// Where it is `far`, the rows that come next are asked for.
template <int R, int M, bool far, class T>
INLINE void dot_block(const T* w, const float* x, float* y, int64_t K, int64_t N, int64_t step) {
  // Few sums are had in several parts: shorter chains round less and do not wait for each other.
  constexpr int U = M == 1 ? ALONE : R * M >= 8 ? 1 : R * M >= 4 ? 2 : 4;
  constexpr int V = far && U * W * sizeof(T) < LINE ? LINE / (W * sizeof(T)) : U;  // vectors at a time
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
  Ahead<T> next{w + R * step, K, K, step - K};
  int64_t i = 0;
  for (; i + V * W <= K; i += V * W)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      add(v % U, i + v * W, All{});
      if (far && v * W * sizeof(T) % LINE == 0) {
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) R == 1 ? __builtin_prefetch(w + i + v * W + ASKED / sizeof(T)) : next.ask();
      }
    }
  for (; V > U && i + U * W <= K; i += U * W)
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

// The first n columns of y, whose rows are N apart; R rows of w at a time.
template <int R, int M, bool far, class T>
static void dot_some(const T* w, const float* x, float* y, int64_t K, int64_t n, int64_t N, int64_t step) {
  int64_t r = 0;
  for (; r + R <= n; r += R) dot_block<R, M, far>(w + r * step, x, y + r, K, N, step);
  for (; r < n; ++r) dot_block<1, M, far>(w + r * step, x, y + r, K, N, step);
}

template <bool far, class T>
INLINE void dots(int64_t rows, const T* w, const float* x, float* y, int64_t K, int64_t n, int64_t N, int64_t step) {
  constexpr int FOUR = W < 16 ? 3 : 4;  // as many sums as registers hold: 12 of 16, 16 of 32
  switch (rows) {
    case 1:  // memory is fastest as one stream
      if (far && K <= NEAR_X) return dot_some<1, 1, far>(w, x, y, K, n, N, step);
      return dot_some<4, 1, far>(w, x, y, K, n, N, step);
    case 2: return dot_some<4, 2, far>(w, x, y, K, n, N, step);
    case 3: return dot_some<4, 3, far>(w, x, y, K, n, N, step);
    default: return dot_some<FOUR, 4, far>(w, x, y, K, n, N, step);
  }
}

constexpr int64_t WEIGHTS_KEPT = 256 << 10;  // bytes, about, that all rows of x meet while they lie in the second-level cache

// y[m, r] = sum_k w[r, k] x[m, k] for w [N, K], its rows `step` elements apart
static void dot_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t M,
                     int64_t N, int64_t step, bool large) {
  DISPATCH(dtype, T, {
    const int64_t bytes = K * sizeof(T), some = (WEIGHTS_KEPT / (bytes + 1) / DOTS + 1) * DOTS;
    auto run = [&](int64_t begin, int64_t end, bool far) {
      for (int64_t n = begin; n < end; n += some)
        for (int64_t m = 0; m < M; m += 4) {
          const T* from = static_cast<const T*>(w) + n * step;
          const int64_t rows = least(M - m, 4), cols = least(end - n, some);
          if (sizeof(T) == 2 && far && m == 0)
            dots<true>(rows, from, x, y + n, K, cols, N, step);
          else
            dots<false>(rows, from, x + m * K, y + m * N + n, K, cols, N, step);
        }
    };
    if (sizeof(T) == 2 && large) return paced(N, paced_rows(bytes, DOTS), run);
    run(0, N, false);
  })
}

// R rows of w, one element after the other or, in two sums, even and odd ones.
template <int R, bool two, class T, class Lanes>
INLINE void axpy_column(const T* w, const float* x, float* y, int64_t pitch, int64_t M, int64_t N,
                        int64_t step, Lanes lanes) {
  vf v[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) v[r] = load(w + r * step, lanes);
  for (int64_t m = 0; m < M; ++m) {
    vf a = load(y + m * N, lanes), b = set1(0);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      vf& sum = two && r % 2 ? b : a;
      sum = fma(v[r], set1(x[m * pitch + r]), sum);
    }
    store(y + m * N, two && R > 1 ? a + b : a, lanes);
  }
}

template <int R, bool far, bool two, class T>
static void axpy_some(const T* w, const float* x, float* y, int64_t pitch, int64_t M, int64_t N,
                      int64_t step) {
  constexpr int V = far && W * sizeof(T) < LINE ? LINE / (W * sizeof(T)) : 1;  // vectors of a line
  Ahead<T> next{w + R * step, N, N, step - N};
  int64_t j = 0;
  for (; j + V * W <= N; j += V * W) {
#pragma GCC unroll 8
    for (int r = 0; far && r < R; ++r) next.ask();
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) axpy_column<R, two>(w + j + v * W, x, y + j + v * W, pitch, M, N, step, All{});
  }
  for (; j + W <= N; j += W) axpy_column<R, two>(w + j, x, y + j, pitch, M, N, step, All{});
  if (j < N) axpy_column<R, two>(w + j, x, y + j, pitch, M, N, step, Some{N - j});
}

constexpr int64_t MOST_ROWS = 16, ROWS_DEPTH = 64;  // each of a block's rows may lie in a page of its own
template <class T>  // rows of a tile of sums; two vectors wide where registers hold them
constexpr int ROWS_EACH = W < 16 ? 6 : sizeof(T) < sizeof(float) ? 8 : 16;

// y[r, 0 .. V * W) += sum_k x[k, r] w[k, 0 .. V * W), R columns of x [depth, MOST_ROWS]; w in float32 goes to `kept` if it is given.
template <int R, int V, bool keeps, class T, class Lanes>
static void rows_tile(const T* w, const float* x, float* y, float* kept, int64_t depth, int64_t N,
                      int64_t step, int64_t ahead, Lanes lanes) {
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
    if (ahead) __builtin_prefetch(w + k * step + ahead, 0, 2);  // the first cache has few places for lines of so many rows
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
  using Rows = void (*)(const T*, const float*, float*, float*, int64_t, int64_t, int64_t, int64_t, Lanes);
  static constexpr Rows some[] = {rows_tile<R + 1, V, keeps, T, Lanes>...};
  return some[rows - 1];
}

// A strip of V * W columns, or its first `lanes`, for M rows of x, `each` at a time: the first of them widen it, the others find it in the cache.
template <int V, class T, class Lanes>
INLINE void rows_strip(const T* w, const float* x, float* y, int64_t each, int64_t depth, int64_t M,
                       int64_t N, int64_t step, int64_t ahead, Lanes lanes) {
  constexpr auto all = std::make_integer_sequence<int, (V > 1 && W >= 16 ? 8 : ROWS_EACH<T>)>{};
  if (each >= M) return rows_tile_of<V, false, T, Lanes>(M, all)(w, x, y, nullptr, depth, N, step, ahead, lanes);
  alignas(64) float kept[ROWS_DEPTH * V * W];
  rows_tile_of<V, true, T, Lanes>(each, all)(w, x, y, kept, depth, N, step, ahead, lanes);
  for (int64_t m = each; m < M; m += each)
    rows_tile_of<V, false, float, Lanes>(least(M - m, each), all)(kept, x + m, y + m * N, nullptr,
                                                                  depth, N, V * W, 0, lanes);
}

// As axpy_rows, for more than AXPY_ROWS rows of x, up to MOST_ROWS.
template <class T>
static void rows_in_registers(const T* w, const float* x, float* y, int64_t K, int64_t pitch, int64_t M,
                              int64_t N, int64_t step) {
  constexpr int64_t ahead = 3 * LINE / sizeof(T);  // strips of a line: the processor does not see what comes
  const int64_t parts = (M + ROWS_EACH<T> - 1) / ROWS_EACH<T>, each = (M + parts - 1) / parts;
  const bool two = W < 16 || each <= 8;  // vectors a row
  float turned[ROWS_DEPTH * MOST_ROWS];
  for (int64_t k = 0; k < K; k += ROWS_DEPTH) {
    const int64_t depth = least(K - k, ROWS_DEPTH);
    turn(Singles<float>{x + k, 1, pitch}, depth, M, [&](int64_t i) { return turned + i * MOST_ROWS; });
    const T* p = w + k * step;
    int64_t j = 0;
    if (two)
      for (; j + 2 * W <= N; j += 2 * W) rows_strip<2>(p + j, turned, y + j, each, depth, M, N, step, ahead, All{});
    for (; j + W <= N; j += W) rows_strip<1>(p + j, turned, y + j, each, depth, M, N, step, ahead, All{});
    if (j < N) rows_strip<1>(p + j, turned, y + j, each, depth, M, N, step, ahead, Some{N - j});
  }
}

// y[m, j] += sum_k x[m, k] w[k, j] for w [K, N], its rows `step` elements apart, those of x `pitch`
static void axpy_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t pitch, int64_t M,
                      int64_t N, int64_t step, bool large) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(w);
    if (M > AXPY_ROWS && M <= MOST_ROWS) return rows_in_registers(p, x, y, K, pitch, M, N, step);
    constexpr int NEAR = 8, FAR = 2;  // rows at a time; far ones' successors leave room for y in the first cache
    const int64_t each = paced_rows(N * sizeof(T), NEAR);
    int64_t k = 0;
    if (sizeof(T) == 2 && large && K >= FEWEST * each) {  // in one order, however many at a time
      paced(K / NEAR * NEAR, each, [&](int64_t begin, int64_t end, bool far) {
        for (k = begin; far && k < end; k += FAR) axpy_some<FAR, true, false>(p + k * step, x + k, y, pitch, M, N, step);
        for (; k < end; k += NEAR) axpy_some<NEAR, false, false>(p + k * step, x + k, y, pitch, M, N, step);
      });
    }
    for (; k + 8 <= K; k += 8) axpy_some<8, false, true>(p + k * step, x + k, y, pitch, M, N, step);
    for (; k < K; ++k) axpy_some<1, false, true>(p + k * step, x + k, y, pitch, M, N, step);
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
