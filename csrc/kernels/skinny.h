// Few rows times a matrix: weights are read once, in their own type, at the speed of memory;
// float32 accumulation.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

template <int R, int M, class T>
INLINE void dot_block(const T* w, const float* x, float* y, int64_t K, int64_t N) {
  vf acc[R][M];
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) acc[r][m] = set1(0);
  int64_t i = 0;
  for (; i + W <= K; i += W) {
    vf xs[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) xs[m] = load(x + m * K + i, All{});
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      vf v = load(w + r * K + i, All{});
#pragma GCC unroll 4
      for (int m = 0; m < M; ++m) acc[r][m] = fma(v, xs[m], acc[r][m]);
    }
  }
  if (i < K) {
    Some lanes{K - i};
    for (int r = 0; r < R; ++r)
      for (int m = 0; m < M; ++m)
        acc[r][m] = fma(load(w + r * K + i, lanes), load(x + m * K + i, lanes), acc[r][m]);
  }
  for (int r = 0; r < R; ++r)
    for (int m = 0; m < M; ++m) y[m * N + r] = sum(acc[r][m]);
}

template <int M, class T>
static void dot_some(const T* w, const float* x, float* y, int64_t K, int64_t N, int64_t begin,
                     int64_t end) {
  int64_t r = begin;
  for (; r + 4 <= end; r += 4) dot_block<4, M>(w + r * K, x, y + r, K, N);
  for (; r < end; ++r) dot_block<1, M>(w + r * K, x, y + r, K, N);
}

// y[m, r] = sum_k w[r, k] x[m, k] for the rows begin..end of w [N, K]
static void dot_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t M,
                     int64_t N, int64_t begin, int64_t end) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(w);
    for (int64_t m = 0; m < M; m += 4) {
      const float* xm = x + m * K;
      float* ym = y + m * N;
      switch (M - m) {
        case 1: dot_some<1>(p, xm, ym, K, N, begin, end); break;
        case 2: dot_some<2>(p, xm, ym, K, N, begin, end); break;
        case 3: dot_some<3>(p, xm, ym, K, N, begin, end); break;
        default: dot_some<4>(p, xm, ym, K, N, begin, end); break;
      }
    }
  })
}

template <int R, class T, class Lanes>
INLINE void axpy_column(const T* w, const float* x, float* y, int64_t K, int64_t M, int64_t N,
                        Lanes lanes) {
  vf v[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) v[r] = load(w + r * N, lanes);
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
                      int64_t cols) {
  int64_t j = 0;
  for (; j + W <= cols; j += W) axpy_column<R>(w + j, x, y + j, K, M, N, All{});
  if (j < cols) axpy_column<R>(w + j, x, y + j, K, M, N, Some{cols - j});
}

// y[m, j] += sum_k x[m, k] w[k, j] for the columns begin..end of w [K, N], eight rows of w at a
// time
static void axpy_rows(DType dtype, const void* w, const float* x, float* y, int64_t K, int64_t M,
                      int64_t N, int64_t begin, int64_t end) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(w) + begin;
    int64_t k = 0;
    for (; k + 8 <= K; k += 8) axpy_some<8>(p + k * N, x + k, y + begin, K, M, N, end - begin);
    for (; k < K; ++k) axpy_some<1>(p + k * N, x + k, y + begin, K, M, N, end - begin);
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
