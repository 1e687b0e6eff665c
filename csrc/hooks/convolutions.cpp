// Guards with the very signatures of convolutions: boxing their many lists would cost other dtypes
// more than a microsecond.
#include <ATen/CompositeExplicitAutogradFunctions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <tuple>

#include "hooks.h"

namespace tensorlogic::hooks {
namespace {

using Ints = c10::SymIntArrayRef;

// The repair is an operator that comes and goes with `enable`, so it is found anew for each call.
template <class Signature>
auto repaired(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor forward(const at::Tensor& x, const at::Tensor& weight,
                   const std::optional<at::Tensor>& bias, Ints stride, Ints padding, Ints dilation,
                   bool transposed, Ints output_padding, c10::SymInt groups) {
  if (x.scalar_type() != at::kHalf || is_suspended())
    return at::compositeexplicitautograd::convolution_symint(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  Suspend inside;
  return repaired<decltype(forward)>("tensorlogic_repaired::convolution")
      .call(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
    const at::Tensor& dy, const at::Tensor& x, const at::Tensor& weight,
    at::OptionalSymIntArrayRef bias_sizes, Ints stride, Ints padding, Ints dilation,
    bool transposed, Ints output_padding, c10::SymInt groups, std::array<bool, 3> mask) {
  if (dy.scalar_type() != at::kHalf || is_suspended())
    return at::compositeexplicitautograd::convolution_backward_symint(
        dy, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups,
        mask);
  Suspend inside;
  return repaired<decltype(backward)>("tensorlogic_repaired::convolution_backward")
      .call(dy, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding,
            groups, mask);
}

}  // namespace

std::optional<torch::CppFunction> typed_guard(const std::string& name) {
  if (name == "convolution") return torch::CppFunction(TORCH_FN(forward));
  if (name == "convolution_backward") return torch::CppFunction(TORCH_FN(backward));
  return std::nullopt;
}

}  // namespace tensorlogic::hooks
