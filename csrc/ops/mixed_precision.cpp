// Products under an error budget, and what a guard looks at: norms and peaks of every row of left and every column
// of right, and the norms of their rows and columns of the product, by a sketch of 64 elements each.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "isa.h"
#include "product.h"

namespace tensorlogic::ops {
namespace {

constexpr int64_t SKETCH = 64, RUN = 16, LONG = 8 * SKETCH;  // as in accuracy.py
constexpr int64_t SHARE = 128;  // of rows, and of columns, that a thread looks at together
constexpr double FARTHEST = 0x1p460;  // as there
constexpr int64_t FOUND = 6;          // of rows, and of columns

std::vector<int64_t> sketch_of(int64_t n) {
  std::vector<int64_t> at;
  const int64_t most = (n - RUN) / (SKETCH / RUN - 1);
  const int64_t step = n <= SKETCH ? RUN : n < LONG ? most : most / RUN * RUN;
  for (int64_t i = 0; i < std::min(n, SKETCH); ++i) at.push_back(i / RUN * step + i % RUN);
  return at;
}

// Norms and peaks, or norms alone, of rows `begin` to `end` of x, or of columns.
void sketch(const Matrix& x, bool columns, int64_t begin, int64_t end, const std::vector<int64_t>& at, double* squares,
            double* peaks = nullptr) {
  LookCall call{};
  call.wide = x.dtype == DType::f64;
  call.dtype = x.dtype;
  call.row = columns ? x.col : x.row;
  call.col = columns ? x.row : x.col;
  call.x = static_cast<const char*>(x.data) + begin * call.row * item_size(x.dtype);
  call.at = at.data();
  call.count = static_cast<int64_t>(at.size());
  call.squares = squares;
  call.peaks = peaks;
  kernels().look(call, 0, end - begin);
}

Matrix matrix(const Input& x, const char* op, const char* name) {
  if (x.shape.dim != 2) fail(std::string(op) + ": " + name + " must be a matrix");
  const bool wide = x.code == code_of(DType::f64);
  return {x.data, wide ? DType::f64 : x.dtype(op, name), x.strides[0], x.strides[1]};
}

// The three matrices of left [M, K] · right [K, N] = out [M, N].
struct Operation {
  Matrix left, right, out;
  int64_t M, N, K;
};

// Of several rows or columns: the sum of their norms², the largest norm² over that of the result, and peak² over norm², the least
// and the largest peak, how many have a result of 0.
struct Seen {
  double total = 0, share = 0, crest = 0, low = std::numeric_limits<double>::infinity(), high = 0, blank = 0;

  void add(double square, double peak, double result) {
    const double most = peak * peak;
    total += square + (std::isfinite(result) ? 0.0 : result);
    if (result > 0 && square > share * result) share = square / result;
    if (square > 0 && result == 0) ++blank;
    if (most > crest * square) crest = most / square;
    if (peak > 0) low = std::min(low, peak);
    high = std::max(high, peak);
  }
  void add(const Seen& other) {
    total += other.total;
    share = std::max(share, other.share);
    crest = std::max(crest, other.crest);
    low = std::min(low, other.low);
    high = std::max(high, other.high);
    blank += other.blank;
  }
};

// Rows of left and of the result, or columns of right and of the result.
struct Side {
  Matrix operand, out;
  bool columns;
  int64_t lines;
  std::vector<int64_t> inner, outer;

  Side(const Operation& p, bool columns)
      : operand(columns ? p.right : p.left),
        out(p.out),
        columns(columns),
        lines(columns ? p.N : p.M),
        inner(sketch_of(p.K)),
        outer(sketch_of(columns ? p.M : p.N)) {}

  Seen look(int64_t begin, int64_t end) const {
    double squares[SHARE], peaks[SHARE], results[SHARE];
    sketch(operand, columns, begin, end, inner, squares, peaks);
    sketch(out, columns, begin, end, outer, results);
    Seen seen;
    for (int64_t i = 0; i < end - begin; ++i) seen.add(squares[i], peaks[i], results[i]);
    return seen;
  }
};

// Rows, then columns.
void look(const Operation& p, double* table) {
  const Side sides[2] = {Side(p, false), Side(p, true)};
  const int64_t count = std::max<int64_t>((std::max(p.M, p.N) + SHARE - 1) / SHARE, 1);
  std::vector<std::array<Seen, 2>> shares(static_cast<size_t>(count));  // summed in their order, whoever looked
  parallel(count, 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n)
      for (size_t s = 0; s < 2; ++s) {
        const int64_t lines = sides[s].lines;
        shares[static_cast<size_t>(n)][s] = sides[s].look(lines * n / count, lines * (n + 1) / count);
      }
  });
  for (size_t s = 0; s < 2; ++s) {
    Seen all;
    for (const auto& share : shares) all.add(share[s]);
    const double found[FOUND] = {all.total, all.share, all.crest, all.low, all.high, all.blank};
    std::copy(found, found + FOUND, table + s * FOUND);
  }
}

Output product_look(const Input& left, const Input& right, const Input& out) {
  const char* op = "product_look";
  const Operation p{matrix(left, op, "left"),  matrix(right, op, "right"), matrix(out, op, "out"),
                    out.shape.sizes[0], out.shape.sizes[1], left.shape.sizes[1]};
  if (left.shape.sizes[0] != out.shape.sizes[0] || right.shape.sizes[1] != out.shape.sizes[1] ||
      left.shape.sizes[1] != right.shape.sizes[0])
    fail("product_look: left " + left.shape.text() + ", right " + right.shape.text() + " and out " +
         out.shape.text() + " are not a product");
  const int64_t sizes[2] = {2, FOUND};
  Output table = make(aoti_torch_dtype_float64(), {sizes, 2});
  look(p, static_cast<double*>(table.data));
  return table;
}

// What an error measured before holds for: bounds of cancellation, of the peaks of lines, and what is too small for a result.
struct Limits {
  double cancels_least, cancels_most, low, high, faint;
};
constexpr int64_t LIMITS = sizeof(Limits) / sizeof(double);

double all_over_seen(int64_t n) { return static_cast<double>(n) / static_cast<double>(std::min(n, SKETCH)); }

// Whether what was seen of a product in float32 is within limits for certain: `_summed` in accuracy.py and `covers` in adapting.py.
bool within(const Operation& p, const double* found, const Limits& limits) {
  const double *rows = found, *columns = found + FOUND;
  for (const double* side : {rows, columns})
    for (int n : {0, 1, 2, 4})
      if (!std::isfinite(side[n])) return false;
  const double share = all_over_seen(p.K);
  const double across = rows[1] * share * columns[0] * share / all_over_seen(p.N);
  const double down = columns[1] * share * rows[0] * share / all_over_seen(p.M);
  const double cancels = std::sqrt(std::max(across, down));
  const double low = std::min(rows[3], columns[3]), high = std::max(rows[4], columns[4]);
  const double least = std::min(rows[3] * std::sqrt(columns[0] * share), columns[3] * std::sqrt(rows[0] * share));
  const double largest = 4 * static_cast<double>(p.K) * rows[4] * columns[4];
  if (high > FARTHEST || low < 1 / FARTHEST || least < limits.faint * std::max(cancels, 1.0)) return false;
  if (largest > std::numeric_limits<float>::max()) return false;  // then all elements are to be looked at
  return cancels >= limits.cancels_least && cancels <= limits.cancels_most && low >= limits.low && high > 0 &&
         high <= limits.high && rows[5] + columns[5] == 0;
}

// matmul_f32 of matrices, and 1 where it is within these limits for certain, else 0.
std::tuple<Output, Output> matmul_watched(const Input& a, const Input& b, int64_t parts, const Input& limits, bool transposed) {
  const char* op = "matmul_watched";
  Operation p{matrix(a, op, "a"), matrix(b, op, "b"), {}, a.shape.sizes[0], b.shape.sizes[transposed ? 0 : 1], a.shape.sizes[1]};
  if (transposed) std::swap(p.right.row, p.right.col);
  limits.check(op, "limits", aoti_torch_dtype_float64());
  if (limits.numel != LIMITS) fail("matmul_watched: limits must be 5 numbers, got " + limits.shape.text());
  Output y = product_f32(op, a, b, transposed, parts), told = make(aoti_torch_dtype_float64(), {nullptr, 0});
  p.out = {y.data, DType::f32, p.N, 1};
  double found[2 * FOUND];
  look(p, found);
  *static_cast<double*>(told.data) = within(p, found, *static_cast<const Limits*>(limits.data));
  return {std::move(y), std::move(told)};
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("product_look(Tensor left, Tensor right, Tensor out) -> Tensor");
  m.def("matmul_watched(Tensor a, Tensor b, int parts, Tensor limits, bool transposed=False) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  using namespace tensorlogic;
  IMPLEMENT(product_look)
  IMPLEMENT(matmul_watched)
}
