// What needs the headers of PyTorch's Python binding.
#define AT_PER_OPERATOR_HEADERS  // none of which is called here
#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <cstddef>
#include <type_traits>

#include "calls.h"

namespace tensorlogic::calls {

static_assert(std::is_same_v<decltype(THPVariable::cdata), decltype(Held::tensor)> &&
                  offsetof(THPVariable, cdata) == offsetof(Held, tensor),
              "this PyTorch keeps the tensor of a Python tensor elsewhere");

bool any_tensor(PyObject* given) { return THPVariable_Check(given); }

PyObject* wrapped(at::Tensor&& tensor) { return THPVariable_Wrap(std::move(tensor)); }

at::Tensor taken(AtenTensorHandle owned) {
  at::Tensor* made = torch::aot_inductor::tensor_handle_to_tensor_pointer(owned);
  at::Tensor tensor = std::move(*made);
  delete made;
  return tensor;
}

void translated() { torch::translate_exception_to_python(std::current_exception()); }

bool traced() { return torch::jit::tracer::isTracing(); }

bool default_devices() {
  using FunctionModes = at::impl::PythonTorchFunctionTLS;
  static PyObject* const type = [] {
    const Ref module(PyImport_ImportModule("torch.utils._device"));
    PyObject* found = module.get() ? PyObject_GetAttrString(module.get(), "DeviceContext") : nullptr;
    PyErr_Clear();
    return found;
  }();
  for (int64_t i = 0; i < FunctionModes::stack_len(); ++i) {
    PyObject* mode = FunctionModes::get_stack_at(i)->ptr(getPyInterpreter());
    if (reinterpret_cast<PyObject*>(Py_TYPE(mode)) != type) return false;
  }
  return true;
}

}  // namespace tensorlogic::calls
