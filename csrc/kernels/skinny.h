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

// y[m, j] += sum_k x[m, k] w[k, j] for w [K, N], its rows `step` elements apart, eight at a time
static void axpy_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t M,
                      int64_t N, int64_t step) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(w);
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) axpy_some<8>(p + k * step, x + k, y, K, M, N, step);
    for (; k < K; ++k) axpy_some<1>(p + k * step, x + k, y, K, M, N, step);
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
