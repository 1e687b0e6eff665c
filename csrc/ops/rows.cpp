// Operators over rows: layer norm, softmax, attention scores, softmax cross-entropy, with their
// gradients.
#include <atomic>
#include <cmath>
#include <memory>

#include "isa.h"
#include "stable_abi.h"

namespace tensorlogic::ops {
namespace {

constexpr int64_t GRAIN =
    16 << 10;  // elements below which a second thread costs more than it brings

// f(begin, end) over rows of `cols` elements
template <class F>
void over_rows(int64_t rows, int64_t cols, const F& f) {
  parallel(rows, cols > 0 && cols < GRAIN ? GRAIN / cols : 1, 1, f);
}

// An optional vector as float32: the tensor's own memory, or a widened copy.
class Vector {
 public:
  Vector(const Maybe& v, const char* op, const char* name, int64_t cols) {
    if (!v) return;
    const DType dtype = v->dtype(op, name);
    v->check(op, name);
    if (v->numel != cols)
      fail(std::string(op) + ": " + name + " must have " + std::to_string(cols) +
           " elements, got " + v->shape.text());
    data = static_cast<const float*>(v->data);
    if (dtype == DType::f32) return;
    copy.reset(new float[static_cast<size_t>(cols)]);
    kernels().convert(dtype, DType::f32, v->data, copy.get(), cols, false);
    data = copy.get();
  }
  const float* data = nullptr;

 private:
  std::unique_ptr<float[]> copy;
};

int64_t rows_of(const Input& x) { return x.cols() ? x.numel / x.cols() : 0; }
Shape leading(const Input& x) { return {x.shape.sizes, x.shape.dim ? x.shape.dim - 1 : 0}; }

std::tuple<Output, Output, Output> layer_norm(const Input& x, const Maybe& gamma, const Maybe& beta,
                                              double eps, int32_t code) {
  const char* op = "layer_norm";
  const DType in = x.dtype(op, "x"), out = dtype_of(code, op, "dtype");
  x.check(op, "x");
  if (out != in && out != DType::f32) fail("layer_norm: dtype must be that of x, or float32");
  const int64_t cols = x.cols();
  Vector g(gamma, op, "gamma", cols), b(beta, op, "beta", cols);
  Output y = make(out, x.shape), mean = make(DType::f32, leading(x)),
         rstd = make(DType::f32, leading(x));
  LayerNormCall call{in,
                     out,
                     x.data,
                     g.data,
                     b.data,
                     y.data,
                     static_cast<float*>(mean.data),
                     static_cast<float*>(rstd.data),
                     cols,
                     static_cast<float>(eps)};
  const Kernels& k = kernels();
  over_rows(rows_of(x), cols, [&](int64_t begin, int64_t end) { k.layer_norm(call, begin, end); });
  return {std::move(y), std::move(mean), std::move(rstd)};
}

// Sums over rows are had per fixed piece of rows, then added in order: the same for every number of
// threads.
std::tuple<Output, Output, Output> layer_norm_backward(const Input& dy, const Input& x,
                                                       const Maybe& gamma, const Input& mean,
                                                       const Input& rstd) {
  const char* op = "layer_norm_backward";
  const DType dtype = x.dtype(op, "x");
  x.check(op, "x");
  dy.check(op, "dy", x.code);
  mean.check(op, "mean", code_of(DType::f32));
  rstd.check(op, "rstd", code_of(DType::f32));
  const int64_t cols = x.cols(), rows = rows_of(x);
  if (dy.numel != x.numel || mean.numel != rows || rstd.numel != rows)
    fail("layer_norm_backward: dy, mean and rstd must fit x " + x.shape.text());
  Vector g(gamma, op, "gamma", cols);
  const int64_t piece = rows > 64 * 64 ? (rows + 63) / 64 : 64, pieces = (rows + piece - 1) / piece;
  const int64_t vectors[] = {pieces > 0 ? pieces : 1, 2, cols};
  Output dx = make(dtype, x.shape), partial = make(code_of(DType::f32), {vectors, 3}, true);
  float* sums = static_cast<float*>(partial.data);
  const Kernels& k = kernels();
  parallel(pieces, 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      float* own = sums + i * 2 * cols;
      LayerNormBackwardCall call{dtype,
                                 dy.data,
                                 x.data,
                                 g.data,
                                 static_cast<const float*>(mean.data),
                                 static_cast<const float*>(rstd.data),
                                 dx.data,
                                 own,
                                 own + cols,
                                 cols};
      k.layer_norm_backward(call, i * piece, (i + 1) * piece < rows ? (i + 1) * piece : rows);
    }
  });
  if (pieces > 1)
    k.reduce_columns(Reduction::sum, DType::f32, sums + 2 * cols, sums, pieces - 1, 2 * cols,
                     2 * cols);
  const Shape vector{vectors + 2, 1};
  Output dgamma = make(dtype, vector), dbeta = make(dtype, vector);
  k.convert(DType::f32, dtype, sums, dgamma.data, cols, false);
  k.convert(DType::f32, dtype, sums + cols, dbeta.data, cols, false);
  return {std::move(dx), std::move(dgamma), std::move(dbeta)};
}

// The mask broadcasts over x's leading dimensions; its last one is that of x.
void set_mask(const char* op, const Input& x, const Input& mask, SoftmaxCall& call) {
  mask.check(op, "mask");
  const int64_t lead = x.shape.dim - 1, missing = x.shape.dim - mask.shape.dim;
  bool fits = mask.shape.dim > 0 && missing >= 0 && lead <= 8 && mask.cols() == call.cols;
  int64_t stride = call.cols;
  for (int64_t d = lead - 1; fits && d >= 0; --d) {
    const int64_t own = d >= missing ? mask.shape.sizes[d - missing] : 1;
    fits = own == 1 || own == x.shape.sizes[d];
    call.mask_sizes[call.mask_dims] = x.shape.sizes[d];
    call.mask_strides[call.mask_dims++] = own == 1 ? 0 : stride;
    stride *= own;
  }
  if (!fits)
    fail(std::string(op) + ": mask " + mask.shape.text() +
         " must broadcast over all but the last dimension of x " + x.shape.text());
  if (mask.code == aoti_torch_dtype_bool()) {
    call.keep = static_cast<const uint8_t*>(mask.data);
    return;
  }
  call.mask = mask.data;
  call.mask_dtype = mask.dtype(op, "mask");
  if (call.mask_dtype != DType::f32 && call.mask_dtype != call.out)
    fail(std::string(op) + ": mask must be bool, float32 or of the output's element type");
}

void run_softmax(const char* op, const Input& x, const Maybe& mask, double scale, bool causal,
                 DType out, void* y) {
  const DType in = x.dtype(op, "x");
  x.check(op, "x");
  if (in != DType::f32 && in != out)
    fail(std::string(op) + ": x must be float32 or have the output's element type");
  const int64_t cols = x.cols(), rows = rows_of(x);
  SoftmaxCall call{};
  call.in = in;
  call.out = out;
  call.x = x.data;
  call.y = y;
  call.cols = cols;
  call.scale = static_cast<float>(scale);
  call.mask_dtype = DType::f32;
  if (causal) call.causal_rows = x.shape.dim > 1 ? x.shape.sizes[x.shape.dim - 2] : 1;
  if (mask) set_mask(op, x, *mask, call);
  const Kernels& k = kernels();
  over_rows(rows, cols, [&](int64_t begin, int64_t end) { k.softmax(call, begin, end); });
}

Output softmax(const Input& x, const Maybe& mask, double scale, bool causal, int32_t code) {
  const DType out = dtype_of(code, "softmax", "dtype");
  Output y = make(out, x.shape);
  run_softmax("softmax", x, mask, scale, causal, out, y.data);
  return y;
}

void softmax_(const Input& x, const Maybe& mask, double scale, bool causal) {
  run_softmax("softmax_", x, mask, scale, causal, x.dtype("softmax_", "x"), x.data);
}

Output softmax_backward(const Input& dy, const Input& y, double scale) {
  const char* op = "softmax_backward";
  const DType dtype = y.dtype(op, "y");
  y.check(op, "y");
  dy.check(op, "dy", y.code);
  if (dy.numel != y.numel)
    fail("softmax_backward: dy " + dy.shape.text() + " must have the shape of y " + y.shape.text());
  Output dx = make(dtype, y.shape);
  const Kernels& k = kernels();
  over_rows(rows_of(y), y.cols(), [&](int64_t begin, int64_t end) {
    k.softmax_backward(dtype, dy.data, y.data, dx.data, y.cols(), static_cast<float>(scale), begin,
                       end);
  });
  return dx;
}

struct Targets {
  int64_t rows, cols, valid;
};

Targets check_targets(const char* op, const Input& logits, const Input& target,
                      int64_t ignore_index) {
  logits.check(op, "logits");
  target.check(op, "target", aoti_torch_dtype_int64());
  Targets t{target.numel, logits.cols(), 0};
  if (logits.numel != t.rows * t.cols)
    fail(std::string(op) + ": target " + target.shape.text() +
         " must have the leading dimensions of logits " + logits.shape.text());
  const int64_t* classes = static_cast<const int64_t*>(target.data);
  for (int64_t r = 0; r < t.rows; ++r) {
    if (classes[r] == ignore_index) continue;
    if (classes[r] < 0 || classes[r] >= t.cols)
      fail(std::string(op) + ": Target " + std::to_string(classes[r]) +
           " is out of bounds: target must hold classes from 0 to " + std::to_string(t.cols - 1) +
           ", or ignore_index " + std::to_string(ignore_index));
    ++t.valid;
  }
  return t;
}

enum : int64_t { NONE, MEAN, SUM };  // reductions of the loss

// loss (one element, or one a row) and log-sum-exp [rows]
std::tuple<Output, Output> softmax_cross_entropy(const Input& logits, const Input& target,
                                                 int64_t ignore_index, double smoothing,
                                                 int64_t reduction) {
  const char* op = "softmax_cross_entropy";
  const DType dtype = logits.dtype(op, "logits");
  const Targets t = check_targets(op, logits, target, ignore_index);
  Output lse = make(DType::f32, {&t.rows, 1});
  std::unique_ptr<float[]> losses(new float[static_cast<size_t>(t.rows)]);
  CrossEntropyCall call{dtype,
                        logits.data,
                        static_cast<const int64_t*>(target.data),
                        losses.get(),
                        static_cast<float*>(lse.data),
                        t.cols,
                        ignore_index,
                        static_cast<float>(smoothing)};
  const Kernels& k = kernels();
  over_rows(t.rows, t.cols, [&](int64_t begin, int64_t end) { k.cross_entropy(call, begin, end); });
  Output loss = make(dtype, reduction == NONE ? target.shape : Shape{nullptr, 0});
  if (reduction == NONE) {
    k.convert(DType::f32, dtype, losses.get(), loss.data, t.rows, false);
    return {std::move(loss), std::move(lse)};
  }
  double total = 0.0;
  for (int64_t r = 0; r < t.rows; ++r) total += losses[static_cast<size_t>(r)];
  const float value =
      static_cast<float>(reduction == MEAN ? total / static_cast<double>(t.valid) : total);
  k.convert(DType::f32, dtype, &value, loss.data, 1, false);
  return {std::move(loss), std::move(lse)};
}

Output softmax_cross_entropy_backward(const Input& dloss, const Input& logits, const Input& target,
                                      const Input& lse, int64_t ignore_index, double smoothing,
                                      int64_t reduction, int64_t stores) {
  const char* op = "softmax_cross_entropy_backward";
  const DType dtype = logits.dtype(op, "logits"), given = dloss.dtype(op, "dloss");
  const Targets t = check_targets(op, logits, target, ignore_index);
  lse.check(op, "lse", code_of(DType::f32));
  dloss.check(op, "dloss");
  if (lse.numel != t.rows || dloss.numel != (reduction == NONE ? t.rows : 1))
    fail(std::string(op) + ": lse and dloss must be those of logits " + logits.shape.text());
  std::unique_ptr<float[]> scales(new float[static_cast<size_t>(t.rows + 1)]);
  const Kernels& k = kernels();
  k.convert(given, DType::f32, dloss.data, scales.get(), dloss.numel, false);
  if (reduction != NONE) {
    const float scale = reduction == MEAN ? scales[0] / static_cast<float>(t.valid) : scales[0];
    for (int64_t r = 0; r < t.rows; ++r) scales[static_cast<size_t>(r)] = scale;
  }
  Output dx = make(dtype, logits.shape);
  CrossEntropyBackwardCall call{dtype,
                                logits.data,
                                static_cast<const int64_t*>(target.data),
                                static_cast<const float*>(lse.data),
                                scales.get(),
                                dx.data,
                                t.cols,
                                ignore_index,
                                static_cast<float>(smoothing),
                                past_caches(logits.numel * item_size(dtype), stores)};
  over_rows(t.rows, t.cols,
            [&](int64_t begin, int64_t end) { k.cross_entropy_backward(call, begin, end); });
  return dx;
}

// relu((acc + bias - mean) / sqrt(var + eps) * gamma + beta), every column with its own numbers.
Output batch_norm_relu(const Input& acc, const Maybe& bias, const Maybe& mean, const Maybe& var,
                       const Maybe& gamma, const Maybe& beta, double eps, int32_t code) {
  const char* op = "batch_norm_relu";
  const DType out = dtype_of(code, op, "dtype");
  acc.check(op, "acc", code_of(DType::f32));
  if (!mean || !var) fail("batch_norm_relu: mean and var are required");
  const int64_t cols = acc.cols();
  const Vector b(bias, op, "bias", cols), m(mean, op, "mean", cols), v(var, op, "var", cols),
      g(gamma, op, "gamma", cols), t(beta, op, "beta", cols);
  std::unique_ptr<float[]> numbers(new float[static_cast<size_t>(2 * cols)]);
  float *scale = numbers.get(), *shift = scale + cols;
  for (int64_t j = 0; j < cols; ++j) {
    const double s = (g.data ? g.data[j] : 1.0) / std::sqrt(v.data[j] + eps);
    const double from = (b.data ? static_cast<double>(b.data[j]) : 0.0) - m.data[j];
    scale[j] = static_cast<float>(s);
    shift[j] = static_cast<float>(from * s + (t.data ? t.data[j] : 0.0));
  }
  Output y = make(out, acc.shape);
  const Kernels& k = kernels();
  const auto* x = static_cast<const float*>(acc.data);
  over_rows(rows_of(acc), cols, [&](int64_t begin, int64_t end) {
    k.scaled_relu(out, x, scale, shift, y.data, cols, begin, end);
  });
  return y;
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def(
      "layer_norm(Tensor x, Tensor? gamma, Tensor? beta, float eps, ScalarType dtype) -> (Tensor, "
      "Tensor, Tensor)");
  m.def(
      "layer_norm_backward(Tensor dy, Tensor x, Tensor? gamma, Tensor mean, Tensor rstd) -> "
      "(Tensor, Tensor, Tensor)");
  m.def("softmax(Tensor x, Tensor? mask, float scale, bool causal, ScalarType dtype) -> Tensor");
  m.def("softmax_(Tensor(a!) x, Tensor? mask, float scale, bool causal) -> ()");
  m.def("softmax_backward(Tensor dy, Tensor y, float scale=1.0) -> Tensor");
  m.def(
      "softmax_cross_entropy(Tensor logits, Tensor target, int ignore_index, float smoothing, int "
      "reduction) -> (Tensor, "
      "Tensor)");
  m.def(
      "softmax_cross_entropy_backward(Tensor dloss, Tensor logits, Tensor target, Tensor lse, int "
      "ignore_index, float "
      "smoothing, int reduction, int stores=0) -> Tensor");
  m.def(
      "batch_norm_relu(Tensor acc, Tensor? bias, Tensor? mean, Tensor? var, Tensor? gamma, Tensor? "
      "beta, float eps, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  using namespace tensorlogic;
  IMPLEMENT(layer_norm)
  IMPLEMENT(layer_norm_backward)
  IMPLEMENT(softmax)
  IMPLEMENT(softmax_)
  IMPLEMENT(softmax_backward)
  IMPLEMENT(softmax_cross_entropy)
  IMPLEMENT(softmax_cross_entropy_backward)
  IMPLEMENT(batch_norm_relu)
}
