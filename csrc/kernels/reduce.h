// Reductions of contiguous memory to float32: a run to one value, or rows onto an accumulating row.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

template <class T>
static float reduce_of(Reduction kind, const T* x, int64_t n) {
  if (kind == Reduction::max) {
    vf m[4] = {set1(LOWEST), set1(LOWEST), set1(LOWEST), set1(LOWEST)};
    FOR_ROW(n, m[k] = larger(m[k], keep(load(x + j, lanes), set1(LOWEST), lanes));)
    return largest(larger(larger(m[0], m[1]), larger(m[2], m[3])));
  }
  if (kind == Reduction::min) {
    vf m[4] = {set1(-LOWEST), set1(-LOWEST), set1(-LOWEST), set1(-LOWEST)};
    FOR_ROW(n, m[k] = smaller(m[k], keep(load(x + j, lanes), set1(-LOWEST), lanes));)
    return smallest(smaller(smaller(m[0], m[1]), smaller(m[2], m[3])));
  }
  constexpr int64_t STEP =
      64 * W;  // 16 numbers in each accumulator, then one level up: rounding does not pile up
  vf all = set1(0);
  for (int64_t first = 0; first < n; first += STEP) {
    const int64_t size = n - first < STEP ? n - first : STEP;
    vf s[4] = {set1(0), set1(0), set1(0), set1(0)};
    FOR_ROW(size, s[k] = s[k] + load(x + first + j, lanes);)
    all = all + total(s);
  }
  return sum(all);
}

static float reduce(Reduction kind, DType dtype, const void* x, int64_t n) {
  DISPATCH(dtype, T, return reduce_of<T>(kind, static_cast<const T*>(x), n))
  return 0.0f;
}

struct Add {
  INLINE_MEMBER vf operator()(vf acc, vf x) const { return acc + x; }
};
struct Larger {
  INLINE_MEMBER vf operator()(vf acc, vf x) const { return larger(acc, x); }
};
struct Smaller {
  INLINE_MEMBER vf operator()(vf acc, vf x) const { return smaller(acc, x); }
};

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
