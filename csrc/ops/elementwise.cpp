// Element-wise operators: broadcast analysis, then one pass of the chosen kernel over the output.
#include "isa.h"
#include "stable_abi.h"

namespace tensorlogic::ops {
namespace {

// Elements below which a second thread costs more than it brings.
constexpr int64_t CHEAP_GRAIN = 64 << 10, COSTLY_GRAIN = 16 << 10;

int64_t grain_of(Elementwise op, DType dtype) {
  const bool costly = (op >= Elementwise::gelu && op <= Elementwise::silu) ||
                      (op >= Elementwise::gelu_bwd && op <= Elementwise::silu_bwd);
  const bool by_table = op <= Elementwise::silu;
  return !costly ? CHEAP_GRAIN : dtype == DType::f32 && !by_table ? COSTLY_GRAIN : 2 * COSTLY_GRAIN;
}

struct Layout {
  int64_t sizes[64];
  int64_t dim = 0, numel = 1, cols = 1;
  Mode modes[3] = {Mode::full, Mode::full, Mode::full};
};

// The broadcast shape, and how each operand meets it as [rows, cols] with one `cols` for all.
template <size_t N>
Layout layout_of(const char* op, const Input* const (&in)[N]) {
  Layout out;
  for (const Input* x : in) out.dim = x->shape.dim > out.dim ? x->shape.dim : out.dim;
  if (out.dim > 64) fail(std::string(op) + ": more than 64 dimensions");
  auto size = [&](const Input* x, int64_t d) {
    const int64_t own = d - (out.dim - x->shape.dim);
    return own < 0 ? 1 : x->shape.sizes[own];
  };
  for (int64_t d = 0; d < out.dim; ++d) {
    out.sizes[d] = 1;
    for (const Input* x : in) {
      const int64_t s = size(x, d);
      if (s != 1 && out.sizes[d] != 1 && s != out.sizes[d])
        fail(std::string(op) + ": shapes " + in[0]->shape.text() + " and " + x->shape.text() +
             " do not broadcast");
      if (s != 1) out.sizes[d] = s;
    }
    out.numel *= out.sizes[d];
  }
  int64_t split = -1;  // dimensions from here on are the columns
  for (size_t k = 0; k < N; ++k) {
    if (in[k]->numel == out.numel) continue;
    out.modes[k] = Mode::one;
    if (in[k]->numel == 1) continue;
    int changes = 0;
    int64_t at = 0;
    bool before = false, first = true, leading = false;
    for (int64_t d = 0; d < out.dim; ++d) {
      if (out.sizes[d] == 1) continue;
      const bool present = size(in[k], d) != 1;
      if (first) leading = present;
      if (!first && present != before) {
        ++changes;
        at = d;
      }
      before = present;
      first = false;
    }
    if (changes != 1 || (split >= 0 && split != at))
      fail(std::string(op) + ": shape " + in[k]->shape.text() + " meets [" +
           "...] neither as rows nor as columns; expand it");
    split = at;
    out.modes[k] = leading ? Mode::column : Mode::row;
  }
  for (int64_t d = split < 0 ? out.dim : split; d < out.dim; ++d) out.cols *= out.sizes[d];
  return out;
}

template <size_t N>
ElementwiseCall prepare(const char* name, Elementwise op, const Input* const (&in)[N],
                        Layout& layout) {
  static const char* const names[] = {"first tensor", "second tensor", "third tensor"};
  ElementwiseCall call{};
  call.op = op;
  call.dtype = in[0]->dtype(name, names[0]);
  for (size_t k = 0; k < N; ++k) in[k]->check(name, names[k], in[0]->code);
  bool same = true;
  for (size_t k = 1; k < N; ++k) same &= in[k]->shape == in[0]->shape;
  if (same) {
    layout.dim = -1;
    layout.numel = in[0]->numel;
  } else {
    layout = layout_of(name, in);
  }
  for (size_t k = 0; k < N; ++k) call.in[k] = {in[k]->data, layout.modes[k]};
  call.cols = layout.cols;
  return call;
}

template <size_t N>
Output run(const char* name, Elementwise op, const Input* const (&in)[N], int64_t stores) {
  Layout layout;
  ElementwiseCall call = prepare(name, op, in, layout);
  Output y = make(call.dtype, layout.dim < 0 ? in[0]->shape : Shape{layout.sizes, layout.dim});
  call.out[0] = y.data;
  const int64_t bytes = layout.numel * item_size(call.dtype);
  call.stream = past_caches(bytes, stores);
  call.near = near_by(bytes * int64_t{N + 1}, stores);
  const Kernels& k = kernels();
  parallel(layout.numel, grain_of(op, call.dtype), UNIT,
           [&](int64_t begin, int64_t end) { k.elementwise(call, begin, end); });
  return y;
}

template <size_t N>
std::tuple<Output, Output> run_two(const char* name, Elementwise op, const Input* const (&in)[N]) {
  Layout layout;
  ElementwiseCall call = prepare(name, op, in, layout);
  const Shape shape = layout.dim < 0 ? in[0]->shape : Shape{layout.sizes, layout.dim};
  Output y = make(call.dtype, shape), z = make(call.dtype, shape);
  call.out[0] = y.data;
  call.out[1] = z.data;
  call.near = near_by(layout.numel * item_size(call.dtype) * int64_t{N + 2}, BY_SIZE);
  const Kernels& k = kernels();
  parallel(layout.numel, grain_of(op, call.dtype), UNIT,
           [&](int64_t begin, int64_t end) { k.elementwise(call, begin, end); });
  return {std::move(y), std::move(z)};
}

#define UNARY(name) \
  Output name(const Input& x, int64_t stores) { return run<1>(#name, Elementwise::name, {&x}, stores); }
#define BINARY(name)                                                  \
  Output name(const Input& a, const Input& b, int64_t stores) {       \
    return run<2>(#name, Elementwise::name, {&a, &b}, stores);        \
  }
#define GRADIENT(name, op)                                            \
  Output name(const Input& dy, const Input& x, int64_t stores) {      \
    return run<2>(#name, Elementwise::op, {&dy, &x}, stores);         \
  }
#define GRADIENTS(name, op)                                                          \
  std::tuple<Output, Output> name(const Input& dy, const Input& a, const Input& b) { \
    return run_two<3>(#name, Elementwise::op, {&dy, &a, &b});                        \
  }
UNARY(neg)
UNARY(relu)
UNARY(silu)
BINARY(add)
BINARY(sub)
BINARY(mul)
BINARY(div)
BINARY(add_relu)
BINARY(mul_relu)
GRADIENT(relu_backward, relu_bwd)
GRADIENT(silu_backward, silu_bwd)
GRADIENTS(mul_backward, mul_bwd)
GRADIENTS(mul_relu_backward, mul_relu_bwd)
GRADIENTS(div_backward, div_bwd)

Output affine(const Input& x, const Input& scale, const Input& bias, int64_t stores) {
  return run<3>("affine", Elementwise::affine, {&x, &scale, &bias}, stores);
}
Output gelu(const Input& x, bool tanh, int64_t stores) {
  return run<1>("gelu", tanh ? Elementwise::gelu_tanh : Elementwise::gelu, {&x}, stores);
}
Output gelu_backward(const Input& dy, const Input& x, bool tanh, int64_t stores) {
  return run<2>("gelu_backward", tanh ? Elementwise::gelu_tanh_bwd : Elementwise::gelu_bwd,
                {&dy, &x}, stores);
}

Output convert(const Input& x, int32_t code) {
  const DType from = x.dtype("convert", "x"), to = dtype_of(code, "convert", "dtype");
  x.check("convert", "x");
  Output y = make(to, x.shape);
  const Kernels& k = kernels();
  const bool stream = past_caches(x.numel * item_size(to));
  parallel(x.numel, CHEAP_GRAIN, UNIT, [&](int64_t begin, int64_t end) {
    k.convert(from, to, static_cast<const char*>(x.data) + begin * item_size(from),
              static_cast<char*>(y.data) + begin * item_size(to), end - begin, stream);
  });
  return y;
}

// What all epilogues share; `y` and `pre` are set by the caller.
EpilogueCall epilogue_call(const Input& acc, const Maybe& bias, const Maybe& residual,
                           int64_t activation, int32_t code) {
  const char* op = "epilogue";
  EpilogueCall call{};
  call.acc_dtype = acc.dtype(op, "acc");
  call.dtype = dtype_of(code, op, "dtype");
  if (call.acc_dtype != DType::f32 && call.acc_dtype != call.dtype)
    fail("epilogue: acc must be float32 or have the output's element type");
  if (activation < 0 || activation > static_cast<int64_t>(Activation::silu))
    fail("epilogue: unknown activation");
  call.activation = static_cast<Activation>(activation);
  acc.check(op, "acc");
  call.acc = acc.data;
  call.cols = acc.cols();
  if (bias) {
    bias->check(op, "bias", code);
    if (bias->numel != call.cols)
      fail("epilogue: bias must have as many elements as acc has columns, got " +
           bias->shape.text());
    call.bias = bias->data;
  }
  if (residual) {
    residual->check(op, "residual", code);
    if (residual->numel != acc.numel)
      fail("epilogue: residual must have the shape of acc, got " + residual->shape.text());
    call.residual = residual->data;
  }
  return call;
}

void run_epilogue(const EpilogueCall& call, int64_t n) {
  const Kernels& k = kernels();
  const int64_t grain = call.activation > Activation::relu ? COSTLY_GRAIN : CHEAP_GRAIN;
  parallel(n, grain, UNIT, [&](int64_t begin, int64_t end) { k.epilogue(call, begin, end); });
}

Output epilogue(const Input& acc, const Maybe& bias, const Maybe& residual, int64_t activation,
                int32_t code) {
  EpilogueCall call = epilogue_call(acc, bias, residual, activation, code);
  Output y = make(call.dtype, acc.shape);
  call.y = y.data;
  call.stream = past_caches(acc.numel * item_size(call.dtype));
  run_epilogue(call, acc.numel);
  return y;
}

std::tuple<Output, Output> epilogue_pre(const Input& acc, const Maybe& bias, const Maybe& residual,
                                        int64_t activation, int32_t code) {
  EpilogueCall call = epilogue_call(acc, bias, residual, activation, code);
  Output y = make(call.dtype, acc.shape), pre = make(call.dtype, acc.shape);
  call.y = y.data;
  call.pre = pre.data;
  run_epilogue(call, acc.numel);
  return {std::move(y), std::move(pre)};
}

void epilogue_(const Input& acc, const Maybe& bias, const Maybe& residual, int64_t activation) {
  EpilogueCall call = epilogue_call(acc, bias, residual, activation, acc.code);
  call.y = acc.data;
  run_epilogue(call, acc.numel);
}

Output dropout(const Input& x, double p, int64_t seed, int64_t offset) {
  const DType dtype = x.dtype("dropout", "x");
  x.check("dropout", "x");
  if (!(p >= 0.0 && p < 1.0)) fail("dropout: p must lie in [0, 1), got " + std::to_string(p));
  Output y = make(dtype, x.shape);
  DropoutCall call{dtype,
                   x.data,
                   y.data,
                   static_cast<uint64_t>(seed),
                   static_cast<uint64_t>(offset),
                   static_cast<float>(p),
                   static_cast<float>(1.0 / (1.0 - p))};
  const Kernels& k = kernels();
  parallel(x.numel, COSTLY_GRAIN, UNIT,
           [&](int64_t begin, int64_t end) { k.dropout(call, begin, end); });
  return y;
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  for (const char* op : {"add", "sub", "mul", "div", "add_relu", "mul_relu"})
    m.def((std::string(op) + "(Tensor a, Tensor b, int stores=0) -> Tensor").c_str());
  for (const char* op : {"neg", "relu", "silu"})
    m.def((std::string(op) + "(Tensor x, int stores=0) -> Tensor").c_str());
  for (const char* op : {"mul_backward", "mul_relu_backward", "div_backward"})
    m.def((std::string(op) + "(Tensor dy, Tensor a, Tensor b) -> (Tensor, Tensor)").c_str());
  m.def("affine(Tensor x, Tensor scale, Tensor bias, int stores=0) -> Tensor");
  m.def("gelu(Tensor x, bool tanh=False, int stores=0) -> Tensor");
  m.def("relu_backward(Tensor dy, Tensor y, int stores=0) -> Tensor");
  m.def("silu_backward(Tensor dy, Tensor x, int stores=0) -> Tensor");
  m.def("gelu_backward(Tensor dy, Tensor x, bool tanh=False, int stores=0) -> Tensor");
  m.def("convert(Tensor x, ScalarType dtype) -> Tensor");
  m.def(
      "epilogue(Tensor acc, Tensor? bias, Tensor? residual, int activation, ScalarType dtype) -> "
      "Tensor");
  m.def(
      "epilogue_pre(Tensor acc, Tensor? bias, Tensor? residual, int activation, ScalarType dtype) "
      "-> (Tensor, Tensor)");
  m.def("epilogue_(Tensor(a!) acc, Tensor? bias, Tensor? residual, int activation) -> ()");
  m.def("dropout(Tensor x, float p, int seed, int offset=0) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  using namespace tensorlogic;
  IMPLEMENT(add)
  IMPLEMENT(sub)
  IMPLEMENT(mul)
  IMPLEMENT(div)
  IMPLEMENT(add_relu)
  IMPLEMENT(mul_relu)
  IMPLEMENT(neg)
  IMPLEMENT(relu)
  IMPLEMENT(silu)
  IMPLEMENT(affine)
  IMPLEMENT(gelu)
  IMPLEMENT(relu_backward)
  IMPLEMENT(silu_backward)
  IMPLEMENT(gelu_backward)
  IMPLEMENT(mul_backward)
  IMPLEMENT(mul_relu_backward)
  IMPLEMENT(div_backward)
  IMPLEMENT(convert)
  IMPLEMENT(epilogue)
  IMPLEMENT(epilogue_pre)
  IMPLEMENT(epilogue_)
  IMPLEMENT(dropout)
}
