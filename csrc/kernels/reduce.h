// Reductions of contiguous memory to float32: a run to one value, or rows onto an accumulating row.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

template <class T>
static float reduce_of(Reduction kind, const T* x, int64_t n) {
  const bool far = n >= FAR_FROM;
  if (kind == Reduction::max) {
    vf m[4] = {set1(LOWEST), set1(LOWEST), set1(LOWEST), set1(LOWEST)};
    FOR_ROW(n, ask_ahead(x + j, k, far); m[k] = larger(m[k], keep(load(x + j, lanes), set1(LOWEST), lanes));)
    return largest(larger(larger(m[0], m[1]), larger(m[2], m[3])));
  }
  if (kind == Reduction::min) {
    vf m[4] = {set1(-LOWEST), set1(-LOWEST), set1(-LOWEST), set1(-LOWEST)};
    FOR_ROW(n, ask_ahead(x + j, k, far); m[k] = smaller(m[k], keep(load(x + j, lanes), set1(-LOWEST), lanes));)
    return smallest(smaller(smaller(m[0], m[1]), smaller(m[2], m[3])));
  }
  constexpr int64_t STEP =
      64 * W;  // 16 numbers in each accumulator, then one level up: rounding does not pile up
  vf all = set1(0);
  for (int64_t first = 0; first < n; first += STEP) {
    const int64_t size = n - first < STEP ? n - first : STEP;
    vf s[4] = {set1(0), set1(0), set1(0), set1(0)};
    FOR_ROW(size, ask_ahead(x + first + j, k, far); s[k] = s[k] + load(x + first + j, lanes);)
    all = all + total(s);
  }
  return sum(all);
}

// W rows of n <= SHORT_ROW elements at a time, a lane each: sums along a short row of lanes cost more
// than the row.
template <class F>
INLINE vf short_rows_of(const float* x, int64_t n, F fold) {
  vf a = strided(x, n), b = a;
  int64_t j = 1;
  if (n > 1) b = strided(x + j++, n);
  for (; j + 1 < n; j += 2) {
    a = fold(a, strided(x + j, n));
    b = fold(b, strided(x + j + 1, n));
  }
  if (j < n) a = fold(a, strided(x + j, n));
  return n > 1 ? fold(a, b) : a;
}

template <class T>
static void reduce_short_of(Reduction kind, const T* x, float* y, int64_t rows, int64_t n) {
  alignas(64) float wide[W * SHORT_ROW] = {};
  for (int64_t r = 0; r < rows; r += W) {
    const int64_t some = rows - r < W ? rows - r : W;
    for (int64_t j = 0; j < some * n; j += W) {
      if (j + W <= some * n)
        store(wide + j, load(x + r * n + j, All{}), All{});
      else
        store(wide + j, load(x + r * n + j, Some{some * n - j}), Some{some * n - j});
    }
    const vf v = kind == Reduction::max   ? short_rows_of(wide, n, Larger{})
                 : kind == Reduction::min ? short_rows_of(wide, n, Smaller{})
                                          : short_rows_of(wide, n, Add{});
    if (some == W)
      store(y + r, v, All{});
    else
      store(y + r, v, Some{some});
  }
}

static void reduce_rows(Reduction kind, DType dtype, const void* x, float* y, int64_t rows,
                        int64_t n) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(x);
    if (n <= SHORT_ROW)
      reduce_short_of<T>(kind, p, y, rows, n);
    else
      for (int64_t r = 0; r < rows; ++r) y[r] = reduce_of<T>(kind, p + r * n, n);
  })
}

static float reduce(Reduction kind, DType dtype, const void* x, int64_t n) {
  DISPATCH(dtype, T, return reduce_of<T>(kind, static_cast<const T*>(x), n))
  return 0.0f;
}

template <int ROWS, class T, class F, class Lanes>
INLINE void fold_column(const T* x, float* acc, int64_t stride, F fold, Lanes lanes) {
  vf a = load(x, lanes);
#pragma GCC unroll 8
  for (int r = 1; r < ROWS; ++r) a = fold(a, load(x + r * stride, lanes));
  store(acc, fold(load(acc, lanes), a), lanes);
}

template <int ROWS, class T, class F>
INLINE void fold_rows(const T* x, float* acc, int64_t cols, int64_t stride, F fold) {
  int64_t j = 0;
  for (; j + W <= cols; j += W) fold_column<ROWS>(x + j, acc + j, stride, fold, All{});
  if (j < cols) fold_column<ROWS>(x + j, acc + j, stride, fold, Some{cols - j});
}

template <class T, class F>
INLINE void fold_all(const T* x, float* acc, int64_t n, int64_t cols, int64_t stride, F fold) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) fold_rows<8>(x + i * stride, acc, cols, stride, fold);
  for (; i < n; ++i) fold_rows<1>(x + i * stride, acc, cols, stride, fold);
}

static void reduce_columns(Reduction kind, DType dtype, const void* x, float* acc, int64_t n,
                           int64_t cols, int64_t stride) {
  DISPATCH(dtype, T, {
    const T* p = static_cast<const T*>(x);
    if (kind == Reduction::max)
      fold_all(p, acc, n, cols, stride, Larger{});
    else if (kind == Reduction::min)
      fold_all(p, acc, n, cols, stride, Smaller{});
    else
      fold_all(p, acc, n, cols, stride, Add{});
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
