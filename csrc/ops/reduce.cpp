// Reductions over a run of neighbouring dimensions.
#include <algorithm>
#include <memory>
#include <vector>

#include "isa.h"
#include "stable_abi.h"

namespace tensorlogic::ops {
namespace {

constexpr int64_t PIECE = 32 << 10;  // elements of a long row that one thread takes at a time
constexpr int64_t GRAIN =
    128 << 10;  // elements below which a second thread costs more than it brings
constexpr int64_t RUN = 1024;  // vectors that are added up in float32
constexpr int64_t SHORT_GRAIN = 32 << 10;  // the same of short rows

double start_of(Reduction kind) {
  if (kind == Reduction::max) return -__builtin_inf();
  if (kind == Reduction::min) return __builtin_inf();
  return 0.0;
}

double fold(Reduction kind, double acc, double x) {
  if (kind == Reduction::max) return x > acc || x != x ? x : acc;
  if (kind == Reduction::min) return x < acc || x != x ? x : acc;
  return acc + x;
}

// One contiguous run, added up in float32 by pieces, those in float64; borders do not depend on the
// threads.
double reduce_run(const Kernels& k, Reduction kind, DType dtype, const char* x, int64_t n) {
  const int64_t step = RUN * k.width;
  double acc = start_of(kind);
  for (int64_t i = 0; i < n; i += step)
    acc = fold(kind, acc,
               k.reduce(kind, dtype, x + i * item_size(dtype), n - i < step ? n - i : step));
  return acc;
}

void reduce_rows(const Kernels& k, Reduction kind, DType dtype, const char* x, float* y,
                 int64_t outer, int64_t n, double scale) {
  const bool brief = n <= SHORT_ROW && outer >= k.width;
  if (brief || (n > SHORT_ROW && n <= RUN * k.width)) {
    const int64_t grain = (brief ? SHORT_GRAIN : GRAIN) / n;
    parallel(outer, grain, brief ? k.width : 1, [&](int64_t begin, int64_t end) {
      k.reduce_rows(kind, dtype, x + begin * n * item_size(dtype), y + begin, end - begin, n);
      if (scale != 1.0)
        for (int64_t r = begin; r < end; ++r) y[r] = static_cast<float>(y[r] * scale);
    });
    return;
  }
  if (outer >= 8 || n <= PIECE) {
    parallel(outer, n < GRAIN ? GRAIN / n : 1, 1, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r)
        y[r] =
            static_cast<float>(reduce_run(k, kind, dtype, x + r * n * item_size(dtype), n) * scale);
    });
    return;
  }
  const int64_t pieces = (n + PIECE - 1) / PIECE;  // few long rows: the pieces are spread
  std::vector<double> partial(static_cast<size_t>(outer * pieces));
  parallel(outer * pieces, GRAIN / PIECE, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / pieces, first = i % pieces * PIECE;
      partial[static_cast<size_t>(i)] =
          reduce_run(k, kind, dtype, x + (row * n + first) * item_size(dtype),
                     n - first < PIECE ? n - first : PIECE);
    }
  });
  for (int64_t r = 0; r < outer; ++r) {
    double acc = start_of(kind);
    for (int64_t i = 0; i < pieces; ++i)
      acc = fold(kind, acc, partial[static_cast<size_t>(r * pieces + i)]);
    y[r] = static_cast<float>(acc * scale);
  }
}

// [outer, n, inner] over n, into y of dtype: pieces of n rows and of `inner` columns onto float32 rows, and, where there are
// several, those rows onto one.
void reduce_columns(const Kernels& k, Reduction kind, DType dtype, const char* x, char* y,
                    int64_t outer, int64_t n, int64_t inner, double scale) {
  constexpr int64_t COLS = 2048, ROWS = 512;
  const int64_t stripes = (inner + COLS - 1) / COLS, pieces = (n + ROWS - 1) / ROWS;
  const int64_t work = (n < ROWS ? n : ROWS) * (inner < COLS ? inner : COLS), size = item_size(dtype);
  auto onto = [&](float* acc, int64_t o, int64_t piece, int64_t stripe, int64_t cols) {
    std::fill(acc, acc + cols, static_cast<float>(start_of(kind)));
    k.reduce_columns(kind, dtype, x + ((o * n + piece) * inner + stripe) * size, acc,
                     std::min(n - piece, ROWS), cols, inner);
  };
  auto finish = [&](float* acc, int64_t o, int64_t stripe, int64_t cols) {
    if (scale != 1.0)
      for (int64_t j = 0; j < cols; ++j) acc[j] = static_cast<float>(acc[j] * scale);
    k.convert(DType::f32, dtype, acc, y + (o * inner + stripe) * size, cols, false);
  };
  if (pieces == 1) {
    parallel(outer * stripes, work < GRAIN ? GRAIN / work : 1, 1, [&](int64_t begin, int64_t end) {
      alignas(64) float acc[COLS];
      for (int64_t i = begin; i < end; ++i) {
        const int64_t stripe = i % stripes * COLS, o = i / stripes, cols = std::min(inner - stripe, COLS);
        onto(acc, o, 0, stripe, cols);
        finish(acc, o, stripe, cols);
      }
    });
    return;
  }
  std::unique_ptr<float[]> partial(new float[static_cast<size_t>(outer * pieces * inner)]);
  parallel(outer * pieces * stripes, work < GRAIN ? GRAIN / work : 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t stripe = i % stripes * COLS, piece = i / stripes % pieces, o = i / stripes / pieces;
      onto(partial.get() + (o * pieces + piece) * inner + stripe, o, piece * ROWS, stripe,
           std::min(inner - stripe, COLS));
    }
  });
  for (int64_t o = 0; o < outer; ++o) {
    float* rows = partial.get() + o * pieces * inner;
    k.reduce_columns(kind, DType::f32, rows + inner, rows, pieces - 1, inner, inner);
    finish(rows, o, 0, inner);
  }
}

Output reduce(const char* op, Reduction kind, const Input& x, int64_t begin, int64_t end,
              bool keepdim) {
  const DType dtype = x.dtype(op, "x");
  x.check(op, "x");
  if (begin < 0 || end < begin || end > x.shape.dim || x.shape.dim > 64)
    fail(std::string(op) + ": dimensions " + std::to_string(begin) + " to " + std::to_string(end) +
         " do not fit x " + x.shape.text());
  int64_t sizes[64], dim = 0, outer = 1, n = 1, inner = 1;
  for (int64_t d = 0; d < x.shape.dim; ++d) {
    const bool reduced = d >= begin && d < end;
    (reduced ? n : d < begin ? outer : inner) *= x.shape.sizes[d];
    if (!reduced || keepdim) sizes[dim++] = reduced ? 1 : x.shape.sizes[d];
  }
  const bool extreme = kind == Reduction::max || kind == Reduction::min;
  if (n == 0 && extreme) fail(std::string(op) + ": x " + x.shape.text() + " has nothing to reduce");
  const Shape shape{sizes, dim};
  Output y = make(dtype, shape);
  const int64_t count = outer * inner;
  const double scale = kind == Reduction::mean ? 1.0 / static_cast<double>(n) : 1.0;
  const Kernels& k = kernels();
  const char* data = static_cast<const char*>(x.data);
  if (n > 0 && inner > 1) {
    if (count > 0) reduce_columns(k, kind, dtype, data, static_cast<char*>(y.data), outer, n, inner, scale);
    return y;
  }
  std::unique_ptr<float[]> wide;
  float* out = static_cast<float*>(y.data);
  if (dtype != DType::f32) {
    wide.reset(new float[static_cast<size_t>(count)]);
    out = wide.get();
  }
  if (n == 0) {
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(0.0 * scale);
  } else if (count > 0) {
    reduce_rows(k, kind, dtype, data, out, outer, n, scale);
  }
  if (dtype != DType::f32) k.convert(DType::f32, dtype, out, y.data, count, false);
  return y;
}

#define REDUCTION(name)                                                   \
  Output name(const Input& x, int64_t begin, int64_t end, bool keepdim) { \
    return reduce(#name, Reduction::name, x, begin, end, keepdim);        \
  }
REDUCTION(sum)
REDUCTION(mean)
REDUCTION(max)
REDUCTION(min)

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  for (const char* op : {"sum", "mean", "max", "min"})
    m.def(
        (std::string(op) + "(Tensor x, int begin, int end, bool keepdim=False) -> Tensor").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  using namespace tensorlogic;
  IMPLEMENT(sum)
  IMPLEMENT(mean)
  IMPLEMENT(max)
  IMPLEMENT(min)
}
