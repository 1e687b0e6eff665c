// What tells one call from another: the tensors as PyTorch's own compiled guard compares them, and who else watches.
#pragma once

#include <ATen/Context.h>
#include <c10/core/DefaultDtype.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "calls.h"

namespace tensorlogic::calls {

struct Seen {
  PyTypeObject* type = nullptr;  // null: absent
  c10::DeviceIndex index = -1;
  uint64_t keys = 0;
  at::ScalarType dtype = at::ScalarType::Undefined;
  bool requires_grad = false;
  size_t first = 0;  // the first parameter that was given this very tensor
  std::vector<int64_t> sizes, strides;
};

inline c10::DispatchKeySet applied(const at::Tensor& t, const c10::impl::LocalDispatchKeySet& local) {
  return (t.key_set() | local.included_) - local.excluded_;
}

// Outside of strided tensors on CPUs and CUDA devices nothing is kept, so sizes and strides may be read as they lie there.
inline bool plain(PyObject* given) {
  if (!exactly_tensor(given)) return false;
  const at::Tensor& t = tensor_of(given);
  const auto device = t.device().type();
  return (device == at::kCPU || device == at::kCUDA) && t.layout() == at::kStrided &&
         !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !t.is_nested();
}

inline size_t first_of(PyObject* const* given, size_t i) {
  return static_cast<size_t>(std::find(given, given + i, given[i]) - given);
}

// Of a plain tensor.
inline Seen looked(PyObject* const* given, size_t i, const c10::impl::LocalDispatchKeySet& local) {
  const at::Tensor& t = tensor_of(given[i]);
  return {Py_TYPE(given[i]),  t.device().index(), applied(t, local).raw_repr(), t.scalar_type(),
          t.requires_grad(),  first_of(given, i), t.sizes().vec(),              t.strides().vec()};
}

inline bool same(const Seen& seen, PyObject* given, const c10::impl::LocalDispatchKeySet& local) {
  if (given == Py_None || !seen.type) return given == Py_None && !seen.type;
  if (Py_TYPE(given) != seen.type) return false;
  const at::Tensor& t = tensor_of(given);
  return t.scalar_type() == seen.dtype && t.device().index() == seen.index &&
         applied(t, local).raw_repr() == seen.keys && t.requires_grad() == seen.requires_grad &&
         t.sizes() == at::IntArrayRef(seen.sizes) &&
         t.strides() == at::IntArrayRef(seen.strides);
}

// What a recorded graph holds of PyTorch's process-wide switches.
struct Switches {
  at::ScalarType dtype;  // the default one
  bool deterministic;
  at::Float32Precision products, convolutions;

  bool operator==(const Switches&) const = default;
  static Switches now() {
    const at::Context& context = at::globalContext();
    const auto precision = [&](at::Float32Op op) {
      const auto found = context.float32Precision(at::Float32Backend::CUDA, op);
      return found == at::Float32Precision::NONE ? at::Float32Precision::IEEE : found;
    };
    return {c10::get_default_dtype_as_scalartype(), context.deterministicAlgorithms(), precision(at::Float32Op::MATMUL),
            precision(at::Float32Op::CONV)};
  }
};

// Attributes of Python's on a tensor, which no graph reads.
inline bool carries(PyObject* tensor) {
  const Ref held(PyObject_GenericGetDict(tensor, nullptr));
  if (!held.get()) PyErr_Clear();
  return !held.get() || PyDict_GET_SIZE(held.get()) > 0;
}

// No mode wants to see a call.
bool unobserved();

// No forward derivative is being taken, by the dict of torch.autograd.forward_ad.
bool underived(PyObject* forward);

}  // namespace tensorlogic::calls
