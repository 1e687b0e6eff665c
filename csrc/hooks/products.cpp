// A guard in front of PyTorch's CPU products: other dtypes pass in a few nanoseconds and without
// Python, halves go to the repaired kernel.
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <memory>

#include "hooks.h"

namespace tensorlogic::hooks {
namespace {

thread_local int64_t suspended = 0;

bool half(const at::Tensor& t) {
  return t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16;
}

// Shapes for which PyTorch's own kernel was chosen. A slot holds one hash: one that is overwritten
// is asked for again, and two that are equal cost time, not correctness.
std::array<std::atomic<uint64_t>, 4096> left;
std::atomic<int64_t> policies{0};  // in force somewhere: nothing is remembered then
thread_local bool leaving = false;

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 29);
}

uint64_t mixed(uint64_t hash, const at::Tensor& t) {
  hash = mixed(hash, static_cast<uint64_t>(t.scalar_type()));
  for (int64_t size : t.sizes()) hash = mixed(hash, static_cast<uint64_t>(size));
  for (int64_t stride : t.strides()) hash = mixed(hash, static_cast<uint64_t>(stride));
  return hash;
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
    const bool alone = policies.load(std::memory_order_relaxed) == 0;
    const uint64_t hash = key(arguments);
    std::atomic<uint64_t>& slot = left[hash % left.size()];
    if (alone && slot.load(std::memory_order_relaxed) == hash)
      return original_.callBoxed(op, keys, stack);
    Suspend inside;
    leaving = false;
    kernel_.callBoxed(repaired_, keys, stack);
    if (leaving && alone) slot.store(hash, std::memory_order_relaxed);
  }

 private:
  // Of the kernel, its tensors, and whether the last is a view of a parameter that is trained.
  uint64_t key(const c10::IValue* arguments) const {
    uint64_t hash = mixed(1, reinterpret_cast<uint64_t>(this));
    for (size_t i = 0; i <= first_ + 1; ++i) hash = mixed(hash, arguments[i].toTensor());
    const at::Tensor& b = arguments[first_ + 1].toTensor();
    return mixed(hash, b.is_view() && b._base().requires_grad());
  }
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
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard handler(&quiet);
  if (auto typed = typed_guard(name)) {
    guards()->impl(name.c_str(), std::move(*typed));
    return;
  }
  auto made = std::make_unique<Guard>(find("aten::", name, overload),
                                      find("tensorlogic_repaired::", name, overload), first, grain);
  const std::string full = overload.empty() ? name : name + "." + overload;
  guards()->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(made)));
}

void unguard() {
  delete guards();
  guards() = nullptr;
}

void leave() { leaving = true; }
void forget() {
  for (auto& slot : left) slot.store(0, std::memory_order_relaxed);
}
// Where the package counts them itself: an operator called twice a policy would take longer than a small product.
int64_t policies_at() {
  static_assert(sizeof policies == sizeof(int64_t) && std::atomic<int64_t>::is_always_lock_free);
  return reinterpret_cast<int64_t>(&policies);
}

}  // namespace

bool is_suspended() { return suspended != 0; }
void suspend(int64_t change) { suspended += change; }

TORCH_LIBRARY(tensorlogic_hooks, m) {
  m.def("guard(str name, str overload, int first, int grain) -> ()", &guard);
  m.def("unguard() -> ()", &unguard);
  m.def("suspend(int change) -> ()", &suspend);
  m.def("leave() -> ()", &leave);
  m.def("forget() -> ()", &forget);
  m.def("policies_at() -> int", &policies_at);
  m.def("pool_all(bool on) -> ()", &pool_all);
  m.def("pools_all() -> bool", &pools_all);
}

}  // namespace tensorlogic::hooks
