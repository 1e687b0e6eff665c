// What a guard looks at under an error budget: norms and peaks of every row of left and every column
// of right, and the norms of their rows and columns of the product, by a sketch of 64 elements each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "op.h"

namespace tensorlogic::ops {
namespace {

constexpr int64_t SKETCH = 64, RUN = 16;   // as in accuracy.py
constexpr int64_t ROWS_A_THREAD = 128;

std::vector<int64_t> sketch_of(int64_t n) {
  std::vector<int64_t> at;
  const int64_t step = n <= SKETCH ? RUN : (n - RUN) / (SKETCH / RUN - 1);
  for (int64_t i = 0; i < std::min(n, SKETCH); ++i) at.push_back(i / RUN * step + i % RUN);
  return at;
}

// squares[i] and peaks[i] of rows begin .. end, element (i, k) at p[i * row + k * col].
template <class T>
void sketch(const T* p, int64_t begin, int64_t end, int64_t row, int64_t col,
            const std::vector<int64_t>& at, double* squares, double* peaks) {
  auto add = [&](int64_t i, double v) {
    squares[i] += v * v;
    const double size = std::fabs(v);
    peaks[i] = size > peaks[i] || size != size ? size : peaks[i];
  };
  if (row == 1) {
    for (int64_t k : at)
      for (int64_t i = begin; i < end; ++i) add(i, p[i + k * col]);
  } else {
    for (int64_t i = begin; i < end; ++i)
      for (int64_t k : at) add(i, p[i * row + k * col]);
  }
}

void sketch(const Input& x, bool columns, int64_t begin, int64_t end, const std::vector<int64_t>& at,
            double* squares, double* peaks) {
  const int64_t row = x.strides[columns ? 1 : 0], col = x.strides[columns ? 0 : 1];
  if (x.code == aoti_torch_dtype_float64())
    sketch(static_cast<const double*>(x.data), begin, end, row, col, at, squares, peaks);
  else
    sketch(static_cast<const float*>(x.data), begin, end, row, col, at, squares, peaks);
}

void check(const Input& x, const char* name) {
  if (x.shape.dim != 2 ||
      (x.code != aoti_torch_dtype_float32() && x.code != aoti_torch_dtype_float64()))
    fail(std::string("product_look: ") + name + " must be a float32 or float64 matrix");
}

// (sum of norms², largest norm² over the result's, largest peak² over norm², least and largest peak)
void summed(const Input& operand, const Input& out, bool columns, double* table) {
  const int64_t rows = out.shape.sizes[columns ? 1 : 0];
  const auto inner = sketch_of(operand.shape.sizes[columns ? 0 : 1]);
  const auto outer = sketch_of(out.shape.sizes[columns ? 0 : 1]);
  std::vector<double> squares(rows), peaks(rows), results(rows), unused(rows);
  parallel(rows, ROWS_A_THREAD, 1, [&](int64_t begin, int64_t end) {
    sketch(operand, columns, begin, end, inner, squares.data(), peaks.data());
    sketch(out, columns, begin, end, outer, results.data(), unused.data());
  });
  double total = 0, share = 0, crest = 0, low = std::numeric_limits<double>::infinity(), high = 0;
  for (int64_t i = 0; i < rows; ++i) {
    total += squares[i] + (std::isfinite(results[i]) ? 0.0 : results[i]);
    if (results[i] > 0) share = std::max(share, squares[i] / results[i]);
    if (squares[i] > 0) {
      crest = std::max(crest, peaks[i] * peaks[i] / squares[i]);
      low = std::min(low, peaks[i]);
    }
    high = std::max(high, peaks[i]);
  }
  const double found[5] = {total, share, crest, low, high};
  std::copy(found, found + 5, table);
}

Output product_look(const Input& left, const Input& right, const Input& out) {
  check(left, "left");
  check(right, "right");
  check(out, "out");
  if (left.shape.sizes[0] != out.shape.sizes[0] || right.shape.sizes[1] != out.shape.sizes[1] ||
      left.shape.sizes[1] != right.shape.sizes[0])
    fail("product_look: left " + left.shape.text() + ", right " + right.shape.text() + " and out " +
         out.shape.text() + " are not a product");
  const int64_t sizes[2] = {2, 5};
  Output table = make(aoti_torch_dtype_float64(), {sizes, 2});
  auto* to = static_cast<double*>(table.data);
  summed(left, out, false, to);
  summed(right, out, true, to + 5);
  return table;
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("product_look(Tensor left, Tensor right, Tensor out) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  m.impl("product_look", BOXED(tensorlogic::ops::product_look));
}
