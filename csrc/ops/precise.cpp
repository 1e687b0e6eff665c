// What a guard looks at under an error budget: norms and peaks of every row of left and every column
// of right, and the norms of their rows and columns of the product, by a sketch of 64 elements each.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "isa.h"
#include "op.h"

namespace tensorlogic::ops {
namespace {

constexpr int64_t SKETCH = 64, RUN = 16, LONG = 8 * SKETCH;  // as in accuracy.py
constexpr int64_t ROWS_A_THREAD = 128;

std::vector<int64_t> sketch_of(int64_t n) {
  std::vector<int64_t> at;
  const int64_t most = (n - RUN) / (SKETCH / RUN - 1);
  const int64_t step = n <= SKETCH ? RUN : n < LONG ? most : most / RUN * RUN;
  for (int64_t i = 0; i < std::min(n, SKETCH); ++i) at.push_back(i / RUN * step + i % RUN);
  return at;
}

void sketch(const Input& x, bool columns, int64_t begin, int64_t end, const std::vector<int64_t>& at,
            double* squares, double* peaks) {
  const bool wide = x.code == aoti_torch_dtype_float64();
  LookCall call{};
  call.x = x.data;
  call.wide = wide;
  if (!wide) call.dtype = x.dtype("product_look", "an operand");
  call.row = x.strides[columns ? 1 : 0];
  call.col = x.strides[columns ? 0 : 1];
  call.at = at.data();
  call.count = static_cast<int64_t>(at.size());
  call.squares = squares;
  call.peaks = peaks;
  kernels().look(call, begin, end);
}

void check(const Input& x, const char* name) {
  if (x.shape.dim != 2) fail(std::string("product_look: ") + name + " must be a matrix");
}

// Rows of left and of the result, or columns of right and of the result.
struct Side {
  const Input &operand, &out;
  bool columns;
  int64_t rows;
  std::vector<int64_t> inner, outer;
  std::vector<double> squares, peaks, results, unused;

  Side(const Input& operand, const Input& out, bool columns)
      : operand(operand),
        out(out),
        columns(columns),
        rows(out.shape.sizes[columns ? 1 : 0]),
        inner(sketch_of(operand.shape.sizes[columns ? 0 : 1])),
        outer(sketch_of(out.shape.sizes[columns ? 0 : 1])),
        squares(rows),
        peaks(rows),
        results(rows),
        unused(rows) {}

  void look(int64_t begin, int64_t end) {
    sketch(operand, columns, begin, end, inner, squares.data(), peaks.data());
    sketch(out, columns, begin, end, outer, results.data(), unused.data());
  }

  // (sum of norms², largest norm² over the result's, largest peak² over norm², least and largest peak,
  // how many have a result of 0)
  void sum(double* table) const {
    double total = 0, share = 0, crest = 0, low = std::numeric_limits<double>::infinity(), high = 0, blank = 0;
    for (int64_t i = 0; i < rows; ++i) {
      total += squares[i] + (std::isfinite(results[i]) ? 0.0 : results[i]);
      if (results[i] > 0) share = std::max(share, squares[i] / results[i]);
      if (squares[i] > 0 && results[i] == 0) ++blank;
      if (squares[i] > 0) crest = std::max(crest, peaks[i] * peaks[i] / squares[i]);
      if (peaks[i] > 0) low = std::min(low, peaks[i]);
      high = std::max(high, peaks[i]);
    }
    const double found[6] = {total, share, crest, low, high, blank};
    std::copy(found, found + 6, table);
  }
};

Output product_look(const Input& left, const Input& right, const Input& out) {
  check(left, "left");
  check(right, "right");
  check(out, "out");
  if (left.shape.sizes[0] != out.shape.sizes[0] || right.shape.sizes[1] != out.shape.sizes[1] ||
      left.shape.sizes[1] != right.shape.sizes[0])
    fail("product_look: left " + left.shape.text() + ", right " + right.shape.text() + " and out " +
         out.shape.text() + " are not a product");
  const int64_t sizes[2] = {2, 6};
  Output table = make(aoti_torch_dtype_float64(), {sizes, 2});
  auto* to = static_cast<double*>(table.data);
  Side rows(left, out, false), columns(right, out, true);
  const int64_t all = rows.rows + columns.rows;  // a share of rows and of columns each: columns, side by side, are quicker
  parallel(all, ROWS_A_THREAD, 1, [&](int64_t begin, int64_t end) {
    for (Side* side : {&rows, &columns}) side->look(side->rows * begin / all, side->rows * end / all);
  });
  rows.sum(to);
  columns.sum(to + 6);
  return table;
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("product_look(Tensor left, Tensor right, Tensor out) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  using namespace tensorlogic;
  IMPLEMENT(product_look)
}
