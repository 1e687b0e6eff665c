// Products of matrices of any layout: batches, split into blocks that threads take, each finished by
// the epilogue while it lies in the cache.
#include <algorithm>

#include <memory>
#include <vector>

#include "isa.h"
#include "op.h"

namespace tensorlogic::ops {
namespace {

constexpr int64_t MOST = 64;               // dimensions
constexpr int64_t WIDEST = 2048;      // where few rows leave room and a row of b is one run of memory
constexpr int64_t GRAIN = 160 << 10;  // multiply-adds below which a second thread costs more than it brings

int64_t over(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Memory of this thread, kept from call to call.
float* scratch(int64_t floats) {
  struct Buffer {
    std::unique_ptr<float[]> memory;
    int64_t size = 0;
  };
  static thread_local Buffer own;
  constexpr int64_t LINE = 64 / sizeof(float);
  if (own.size < floats + LINE) {
    own.memory.reset(new float[static_cast<size_t>(floats + LINE)]);
    own.size = floats + LINE;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(own.memory.get());
  return reinterpret_cast<float*>((at + 63) / 64 * 64);
}

struct Product {
  Matrix a, b;
  int64_t M, N, K, batch = 1;
  int64_t dims = 0, sizes[MOST], a_steps[MOST], b_steps[MOST];  // of the batch, in elements
  Activation activation;
  DType dtype;
  int parts = 3;  // of a float32 operand, see GemmCall
  const char *bias = nullptr, *residual = nullptr;
  char *y = nullptr, *pre = nullptr;
};

// How many rows and columns a block has, so that the blocks occupy the threads evenly and little is packed twice.
struct Blocks {
  int64_t rows, cols, down, across, depth;
  int64_t count() const { return down * across; }
};

constexpr int64_t ALONG = 2, TURNED = 9;  // to pack a vector of elements, in multiply-adds of BLAS's kind

// The depth of the panels, and so the order of the sums, does not depend on the number of threads.
Blocks split(const Kernels& k, const Product& p) {
  const int64_t unit = k.gemm_columns;
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  if (p.batch * p.M * p.N * p.K <= GRAIN) threads = 1;
  const bool runs = p.b.col == 1;
  const int64_t most_rows = k.gemm_block_rows, most_cols = k.gemm_block_cols;
  const int64_t widest =
      runs ? std::clamp(most_rows * most_cols / std::min(p.M, most_rows), most_cols, WIDEST) : most_cols;
  const int64_t right = k.gemm_packing * (runs ? ALONG : TURNED),
                left = k.gemm_packing * (p.a.col == 1 ? ALONG : TURNED);
  const int64_t depth = k.gemm_depth * most_cols / widest;
  const int64_t narrowest = over(p.N, widest), tallest = over(p.M, most_rows);
  Blocks best{};
  int64_t least = 0;
  auto consider = [&](int64_t down, int64_t across) {
    Blocks found{over(p.M, down), over(over(p.N, across), unit) * unit, 0, 0, depth};
    found.down = over(p.M, found.rows);
    found.across = over(p.N, found.cols);
    const int64_t turns = over(found.count() * p.batch, threads);
    const int64_t cost =
        turns * (found.rows * found.cols + right * found.cols + left * found.rows);
    if (best.rows && cost >= least) return;
    best = found;
    least = cost;
  };
  consider(tallest, narrowest);
  if (threads == 1) return best;
  for (int64_t across = narrowest; across < narrowest + 8; ++across) {
    const int64_t share = over(threads, p.batch * across);  // blocks down that occupy all threads
    for (int64_t down : {tallest, tallest + 1, tallest + 2, share, 2 * share})
      if (down >= tallest) consider(down, across);
  }
  return best;
}

const char* at(const void* data, DType dtype, int64_t element) {
  return static_cast<const char*>(data) + element * item_size(dtype);
}

// Where matrix number `item` of the batch begins.
int64_t offset_of(const Product& p, const int64_t (&steps)[MOST], int64_t item) {
  int64_t at = 0;
  for (int64_t d = p.dims - 1; d >= 0; --d) {
    at += item % p.sizes[d] * steps[d];
    item /= p.sizes[d];
  }
  return at;
}

// Columns j to j + n of one row of the output, or all columns of several rows, from their float32 sums.
void finish(const Kernels& k, const Product& p, const float* acc, int64_t row, int64_t j, int64_t n,
            int64_t rows = 1) {
  const int64_t size = item_size(p.dtype), offset = (row * p.N + j) * size;
  EpilogueCall call{};
  call.activation = p.activation;
  call.acc_dtype = DType::f32;
  call.dtype = p.dtype;
  call.acc = acc;
  call.bias = p.bias ? p.bias + j * size : nullptr;
  call.residual = p.residual ? p.residual + offset : nullptr;
  call.y = p.y + offset;
  call.pre = p.pre ? p.pre + offset : nullptr;
  call.cols = n;
  k.epilogue(call, 0, rows * n);
}

// True where the sums are the output, and whole tiles fill it.
bool sums_stay(const Kernels& k, const Product& p, int64_t rows, int64_t cols) {
  const bool plain = p.dtype == DType::f32 && !p.bias && !p.residual && !p.pre;
  return plain && p.activation == Activation::none && cols % k.gemm_columns == 0 &&
         (!k.gemm_whole_rows || rows % k.gemm_rows == 0);
}

// One block of one matrix of the batch: rows from i, columns from j.
void block(const Kernels& k, const Product& p, const Blocks& blocks, int64_t item, int64_t i,
           int64_t j) {
  GemmCall call{};
  call.a = {at(p.a.data, p.a.dtype, offset_of(p, p.a_steps, item) + i * p.a.row), p.a.dtype,
            p.a.row, p.a.col};
  call.b = {at(p.b.data, p.b.dtype, offset_of(p, p.b_steps, item) + j * p.b.col), p.b.dtype,
            p.b.row, p.b.col};
  call.M = std::min(blocks.rows, p.M - i);
  call.N = std::min(blocks.cols, p.N - j);
  call.K = p.K;
  call.parts = p.parts;
  call.depth = blocks.depth;
  call.pitch = over(call.N, k.gemm_columns) * k.gemm_columns;
  const int64_t once = std::min(call.depth, k.gemm_otherwise ? k.gemm_otherwise->gemm_depth : call.depth);
  const bool stay = sums_stay(k, p, call.M, call.N);
  call.all_rows = stay || call.K > once;
  const int64_t tiles = call.all_rows ? over(call.M, k.gemm_rows) : 1;
  const int64_t sums = stay ? 0 : tiles * k.gemm_rows * call.pitch;
  call.c = scratch(sums + k.gemm_scratch(call.N, call.depth));
  call.scratch = call.c + sums;
  if (stay) {
    call.c = reinterpret_cast<float*>(p.y) + (item * p.M + i) * p.N + j;
    call.pitch = p.N;
  }
  const bool whole = call.N == p.N && call.pitch == p.N;
  auto done = [&](const float* c, int64_t row, int64_t rows) {
    if (stay) return;
    const int64_t first = item * p.M + i + row;
    if (whole) return finish(k, p, c, first, j, call.N, rows);
    for (int64_t r = 0; r < rows; ++r) finish(k, p, c + r * call.pitch, first + r, j, call.N);
  };
  call.context = &done;
  call.done = [](void* context, const float* c, int64_t row, int64_t rows) {
    (*static_cast<decltype(done)*>(context))(c, row, rows);
  };
  k.gemm(call);
}

void in_blocks(const Kernels& k, const Product& p) {
  const Blocks blocks = split(k, p);
  parallel(p.batch * blocks.count(), 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int64_t item = n / blocks.count(), inside = n % blocks.count();
      block(k, p, blocks, item, inside % blocks.down * blocks.rows,
            inside / blocks.down * blocks.cols);
    }
  });
}

// Up to so many rows, b is read as it lies instead of being packed: each of its elements serves few products.
int64_t few_rows(const Kernels& k, const Product& p) {
  if (p.a.dtype == DType::f64 || p.b.dtype == DType::f64) return 0;
  const bool pairs = k.gemm_pairs && p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16;
  if (p.b.row == 1) return pairs ? 5 : 12;  // along K: dot products
  if (p.b.col == 1) return pairs ? 4 : 6;
  return 0;
}

void by_few_rows(const Kernels& k, const Product& p) {
  const int64_t size = p.M * p.K;
  std::unique_ptr<float[]> x(new float[static_cast<size_t>(p.batch * size)]);
  for (int64_t i = 0; i < p.batch * p.M; ++i) {
    const int64_t from = offset_of(p, p.a_steps, i / p.M) + i % p.M * p.a.row;
    float* to = x.get() + i * p.K;
    if (p.a.col == 1)
      k.convert(p.a.dtype, DType::f32, at(p.a.data, p.a.dtype, from), to, p.K, false);
    else
      for (int64_t n = 0; n < p.K; ++n)
        k.convert(p.a.dtype, DType::f32, at(p.a.data, p.a.dtype, from + n * p.a.col), to + n, 1, false);
  }
  const bool dots = p.b.row == 1;
  const int64_t unit = dots ? 4 : 64, columns = over(p.N, unit) * unit;  // so that no unit spans two items
  parallel(p.batch * columns, std::max(unit, GRAIN / (p.K + 1)), unit, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t item = begin / columns, j = begin % columns;
      const int64_t n = std::min(std::min(end - begin, columns - j), p.N - j);
      const void* w = at(p.b.data, p.b.dtype, offset_of(p, p.b_steps, item) + j * p.b.col);
      float* acc = scratch(p.M * n);
      const float* xs = x.get() + item * size;
      if (dots) {
        k.dot_rows(p.b.dtype, w, xs, acc, p.K, p.M, n, p.b.col);
      } else {
        std::fill(acc, acc + p.M * n, 0.0f);
        k.axpy_rows(p.b.dtype, w, xs, acc, p.K, p.M, n, p.b.row);
      }
      for (int64_t m = 0; m < p.M; ++m) finish(k, p, acc + m * n, item * p.M + m, j, n);
      begin = std::min(end, (item + 1) * columns);
    }
  });
}

void run(Product& p) {
  if (p.batch * p.M * p.N == 0) return;
  const Kernels& k = kernels();
  if (p.N == 1 && p.M > 1 && !p.bias) {  // a matrix times a vector is a vector times its transpose
    std::swap(p.M, p.N);
    std::swap(p.a, p.b);
    std::swap(p.a_steps, p.b_steps);
    std::swap(p.a.row, p.a.col);
    std::swap(p.b.row, p.b.col);
  }
  if (p.M <= few_rows(k, p)) return by_few_rows(k, p);
  const bool served = !k.gemm_pays || k.gemm_pays(p.a.dtype, p.b.dtype, p.parts, p.M, p.N, p.K);
  in_blocks(served ? k : *k.gemm_otherwise, p);
}

struct Result {
  int64_t sizes[MOST], dim = 0;
  void add(int64_t size) { sizes[dim++] = size; }
  Shape shape() const { return {sizes, dim}; }
};

// The leading dimensions of both operands, broadcast into the batch.
void batch_of(const Input& a, const Input& b, Product& p) {
  const int64_t own = std::max<int64_t>(a.shape.dim - 2, 0);
  const int64_t other = std::max<int64_t>(b.shape.dim - 2, 0);
  p.dims = std::max(own, other);
  for (int64_t d = 0; d < p.dims; ++d) {
    const int64_t i = d - (p.dims - own), j = d - (p.dims - other);
    const int64_t m = i < 0 ? 1 : a.shape.sizes[i], n = j < 0 ? 1 : b.shape.sizes[j];
    if (m != n && m != 1 && n != 1)
      fail("gemm: the leading dimensions of a " + a.shape.text() + " and b " + b.shape.text() +
           " do not broadcast");
    p.sizes[d] = m == 1 ? n : m;
    p.a_steps[d] = m == 1 ? 0 : a.strides[i];
    p.b_steps[d] = n == 1 ? 0 : b.strides[j];
    p.batch *= p.sizes[d];
  }
}

// A batch over one b is one product of more rows, where the rows of a are evenly spaced.
void merge_rows(Product& p) {
  int64_t row = p.M > 1 ? p.a.row : 0, next = p.a.row * p.M;
  bool begun = p.M > 1;
  for (int64_t d = p.dims - 1; d >= 0; --d) {
    if (p.sizes[d] == 1) continue;
    if (p.b_steps[d] != 0 || (begun && p.a_steps[d] != next)) return;
    if (!begun) row = p.a_steps[d];
    begun = true;
    next = p.a_steps[d] * p.sizes[d];
  }
  p.a.row = row;
  p.M *= p.batch;
  p.batch = 1;
  p.dims = 0;
}

// The element type of an operand; float64 where `wide`.
DType operand(const char* op, const Input& x, const char* name, bool wide) {
  return wide && x.code == code_of(DType::f64) ? DType::f64 : x.dtype(op, name);
}

Product product_of(const char* op, const Input& a, const Input& b, bool transposed,
                   int64_t activation, DType dtype, Result& out, bool wide = false) {
  if (a.shape.dim < 1 || b.shape.dim < 1 || a.shape.dim > MOST || b.shape.dim > MOST)
    fail(std::string(op) + ": a " + a.shape.text() + " and b " + b.shape.text() + " need 1 to 64 dimensions");
  Product p{};
  p.batch = 1;
  p.dtype = dtype;
  p.parts = dtype == DType::f32 ? 3 : 2;
  auto last = [](const Input& x, int64_t n) { return x.shape.dim - n; };
  const bool vector = b.shape.dim == 1;
  const int64_t inner = vector ? 0 : last(b, transposed ? 1 : 2), columns = last(b, transposed ? 2 : 1);
  p.a = {a.data, operand(op, a, "a", wide), a.shape.dim > 1 ? a.strides[last(a, 2)] : 0, a.strides[last(a, 1)]};
  p.b = {b.data, operand(op, b, "b", wide), b.strides[inner], vector ? 1 : b.strides[columns]};
  p.M = a.shape.dim > 1 ? a.shape.sizes[last(a, 2)] : 1;
  p.K = a.cols();
  p.N = vector ? 1 : b.shape.sizes[columns];
  if (b.shape.sizes[inner] != p.K)
    fail(std::string(op) + ": a " + a.shape.text() + " does not fit b " + b.shape.text());
  batch_of(a, b, p);
  for (int64_t d = 0; d < p.dims; ++d) out.add(p.sizes[d]);
  if (a.shape.dim > 1) out.add(p.M);
  if (!vector) out.add(p.N);
  merge_rows(p);
  if (activation < 0 || activation > static_cast<int64_t>(Activation::silu))
    fail(std::string(op) + ": unknown activation");
  p.activation = static_cast<Activation>(activation);
  return p;
}

void attach(const char* op, Product& p, const Result& out, const Maybe& bias, const Maybe& residual) {
  if (bias) {
    bias->check(op, "bias", code_of(p.dtype));
    if (bias->numel != p.N)
      fail(std::string(op) + ": bias must have " + std::to_string(p.N) + " elements, got " + bias->shape.text());
    p.bias = static_cast<const char*>(bias->data);
  }
  if (residual) {
    residual->check(op, "residual", code_of(p.dtype));
    if (residual->numel != out.shape().numel())
      fail(std::string(op) + ": residual must have the shape of the output, got " + residual->shape.text());
    p.residual = static_cast<const char*>(residual->data);
  }
}

Output result(Product& p, const Result& shape) {
  Output y = make(p.dtype, shape.shape());
  p.y = static_cast<char*>(y.data);
  run(p);
  return y;
}

std::tuple<Output, Output> results(Product& p, const Result& shape) {
  Output y = make(p.dtype, shape.shape()), pre = make(p.dtype, shape.shape());
  p.y = static_cast<char*>(y.data);
  p.pre = static_cast<char*>(pre.data);
  run(p);
  return {std::move(y), std::move(pre)};
}

// Outputs have the right operand's element type: the left one may be wider.
Output matmul(const Input& a, const Input& b, int64_t activation) {
  Result shape;
  Product p = product_of("matmul", a, b, false, activation, b.dtype("matmul", "b"), shape);
  return result(p, shape);
}
std::tuple<Output, Output> matmul_pre(const Input& a, const Input& b, int64_t activation) {
  Result shape;
  Product p = product_of("matmul", a, b, false, activation, b.dtype("matmul", "b"), shape);
  return results(p, shape);
}
// Operands may be float64, narrowed while they are packed. `parts`: bfloat16 parts of float32 operands that are enough; 3 for float32's own accuracy.
Output matmul_f32(const Input& a, const Input& b, bool transposed, int64_t parts) {
  Result shape;
  Product p = product_of("matmul_f32", a, b, transposed, 0, DType::f32, shape, true);
  if (parts < 1 || parts > 3) fail("matmul_f32: parts must be 1, 2 or 3");
  p.parts = static_cast<int>(parts);
  return result(p, shape);
}
Output linear(const Input& x, const Input& weight, const Maybe& bias, const Maybe& residual,
              int64_t activation) {
  Result shape;
  const DType dtype = weight.dtype("linear", "weight");
  Product p = product_of("linear", x, weight, true, activation, dtype, shape);
  attach("linear", p, shape, bias, residual);
  return result(p, shape);
}
std::tuple<Output, Output> linear_pre(const Input& x, const Input& weight, const Maybe& bias,
                                      const Maybe& residual, int64_t activation) {
  Result shape;
  const DType dtype = weight.dtype("linear", "weight");
  Product p = product_of("linear", x, weight, true, activation, dtype, shape);
  attach("linear", p, shape, bias, residual);
  return results(p, shape);
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("matmul(Tensor a, Tensor b, int activation=0) -> Tensor");
  m.def("matmul_pre(Tensor a, Tensor b, int activation) -> (Tensor, Tensor)");
  m.def("matmul_f32(Tensor a, Tensor b, bool transposed=False, int parts=3) -> Tensor");
  const std::string arguments =
      "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, int activation=0) -> ";
  m.def(("linear" + arguments + "Tensor").c_str());
  m.def(("linear_pre" + arguments + "(Tensor, Tensor)").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  using namespace tensorlogic;
  IMPLEMENT(matmul)
  IMPLEMENT(matmul_pre)
  IMPLEMENT(matmul_f32)
  IMPLEMENT(linear)
  IMPLEMENT(linear_pre)
}
