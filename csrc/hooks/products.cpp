// A guard in front of PyTorch's CPU products: other dtypes pass in a few nanoseconds and without
// Python, halves go to the repaired kernel.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <memory>

#include "hooks.h"

namespace tensorlogic::hooks {
namespace {

thread_local int64_t suspended = 0;  // repairs and measurements on this thread see PyTorch's own

struct Suspend {
  Suspend() { ++suspended; }
  ~Suspend() { --suspended; }
  Suspend(const Suspend&) = delete;
  Suspend& operator=(const Suspend&) = delete;
};

bool half(const at::Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

class Guard final : public c10::OperatorKernel {
 public:
  Guard(const c10::OperatorHandle& op, c10::OperatorHandle repaired, int64_t first, int64_t grain)
      : original_(op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU)),
        kernel_(repaired.getComputedKernelForDispatchKey(c10::DispatchKey::CPU)),
        repaired_(std::move(repaired)),
        arguments_(op.schema().arguments().size()),
        first_(static_cast<size_t>(first)),
        grain_(grain) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                  torch::jit::Stack* stack) {
    const c10::IValue* arguments = stack->data() + stack->size() - arguments_;
    const at::Tensor& a = arguments[first_].toTensor();
    if (!half(a) || suspended || small(a, arguments[first_ + 1].toTensor()))
      return original_.callBoxed(op, keys, stack);
    Suspend inside;
    kernel_.callBoxed(repaired_, keys, stack);
  }

 private:
  // Fewer multiplications than a look-up is worth: a [.., M, K] times b [.., K, N] or [K].
  bool small(const at::Tensor& a, const at::Tensor& b) const {
    return grain_ > 0 && a.numel() * (b.dim() > 1 ? b.size(-1) : 1) <= grain_;
  }

  c10::SafeKernelFunction original_, kernel_;
  c10::OperatorHandle repaired_;
  size_t arguments_, first_;
  int64_t grain_;
};

torch::Library*& guards() {
  static torch::Library* it = nullptr;  // not destroyed at exit: PyTorch may be gone by then
  return it;
}

c10::OperatorHandle find(const char* space, const std::string& name, const std::string& overload) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((space + name).c_str(), overload.c_str());
}

// That an operator has a kernel already is the point here, not a mistake to warn of.
class Quiet final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

void guard(const std::string& name, const std::string& overload, int64_t first, int64_t grain) {
  if (!guards())
    guards() = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__,
                                  __LINE__);
  auto made = std::make_unique<Guard>(find("aten::", name, overload),
                                      find("tensorlogic_repaired::", name, overload), first, grain);
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard handler(&quiet);
  const std::string full = overload.empty() ? name : name + "." + overload;
  guards()->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(made)));
}

void unguard() {
  delete guards();
  guards() = nullptr;
}

void suspend(int64_t change) { suspended += change; }

}  // namespace

TORCH_LIBRARY(tensorlogic_hooks, m) {
  m.def("guard(str name, str overload, int first, int grain) -> ()", &guard);
  m.def("unguard() -> ()", &unguard);
  m.def("suspend(int change) -> ()", &suspend);
  m.def("pool_all(bool on) -> ()", &pool_all);
  m.def("pools_all() -> bool", &pools_all);
}

}  // namespace tensorlogic::hooks
