// The operators that are products: matmul and linear, their operands' shapes and strides as PyTorch has them.
#include <algorithm>
#include <atomic>
#include <memory>

#include "isa.h"
#include "product.h"

namespace tensorlogic::ops {
namespace {

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
Output matmul_f32(const Input& a, const Input& b, bool transposed, int64_t parts) {
  return product_f32("matmul_f32", a, b, transposed, parts);
}
Output linear(const Input& x, const Input& weight, const Maybe& bias, const Maybe& residual,
              int64_t activation) {
  Result shape;
  const DType dtype = weight.dtype("linear", "weight");
  Product p = product_of("linear", x, weight, true, activation, dtype, shape);
  attach("linear", p, shape, bias, residual);
  return result(p, shape);
}
// A weight [N, K] as this machine's tiles want it, as bytes; none where it has no tiles or the numbers do not
// go into them.
Output pack_weight(const Input& weight) {
  const char* op = "pack_weight";
  if (weight.shape.dim != 2) fail("pack_weight: weight " + weight.shape.text() + " must have two dimensions");
  const Kernels& k = kernels();
  const DType dtype = weight.dtype(op, "weight");
  const int64_t N = weight.shape.sizes[0], K = weight.shape.sizes[1], none = 0;
  const Matrix b{weight.data, dtype, weight.strides[1], weight.strides[0]};
  if (k.gemm_pack && N * K > 0) {
    const int64_t bytes = k.gemm_packed(dtype, N, K);
    Output out = make(aoti_torch_dtype_uint8(), {&bytes, 1});
    std::atomic<bool> good{true};
    parallel(N, 1, k.gemm_columns, [&](int64_t begin, int64_t end) {
      if (!k.gemm_pack(b, begin, end, N, K, out.data)) good = false;
    });
    if (good) return out;
  }
  return make(aoti_torch_dtype_uint8(), {&none, 1});
}

// linear with the weight as `pack_weight` laid it out; the weight itself serves what leaves the tiles' range.
Output linear_packed(const Input& x, const Input& weight, const Input& packed, const Maybe& bias,
                     const Maybe& residual, int64_t activation) {
  const char* op = "linear_packed";
  Result shape;
  const DType dtype = weight.dtype(op, "weight");
  Product p = product_of(op, x, weight, true, activation, dtype, shape);
  attach(op, p, shape, bias, residual);
  const Kernels& k = kernels();
  if (k.gemm_pack && weight.shape.dim == 2) {
    packed.check(op, "packed", aoti_torch_dtype_uint8());
    if (packed.numel != k.gemm_packed(dtype, p.N, p.K))
      fail("linear_packed: packed must be what pack_weight made of weight " + weight.shape.text());
    p.tiles = packed.data;
  }
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

// Operands may be float64, narrowed while they are packed. `parts`: bfloat16 parts of float32 operands that are enough; 3 for float32's own accuracy;
// 0: whole numbers of 2364 steps a row of a panel, where no element is so large that the others would have too few.
Output product_f32(const char* op, const Input& a, const Input& b, bool transposed, int64_t parts) {
  Result shape;
  Product p = product_of(op, a, b, transposed, 0, DType::f32, shape, true);
  if (parts < 0 || parts > 3) fail(std::string(op) + ": parts must be 0, 1, 2 or 3");
  p.steps = parts == 0;
  if (parts) p.parts = static_cast<int>(parts);
  return result(p, shape);
}

}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("matmul(Tensor a, Tensor b, int activation=0) -> Tensor");
  m.def("matmul_pre(Tensor a, Tensor b, int activation) -> (Tensor, Tensor)");
  m.def("matmul_f32(Tensor a, Tensor b, bool transposed=False, int parts=3) -> Tensor");
  const std::string arguments =
      "(Tensor x, Tensor weight, Tensor? bias=None, Tensor? residual=None, int activation=0) -> ";
  m.def(("linear" + arguments + "Tensor").c_str());
  m.def("pack_weight(Tensor weight) -> Tensor");
  m.def(
      "linear_packed(Tensor x, Tensor weight, Tensor packed, Tensor? bias=None, Tensor? residual=None, int "
      "activation=0) -> Tensor");
  m.def(("linear_pre" + arguments + "(Tensor, Tensor)").c_str());
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  using namespace tensorlogic;
  IMPLEMENT(matmul)
  IMPLEMENT(matmul_pre)
  IMPLEMENT(matmul_f32)
  IMPLEMENT(linear)
  IMPLEMENT(linear_pre)
  IMPLEMENT(pack_weight)
  IMPLEMENT(linear_packed)
}
