// What this module asks of PyTorch's Python binding, whose headers take a compiler ten seconds a file: one file alone reads them
// (python.cpp), and there what is said here is held against them.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

extern PyObject *THPVariableClass, *ParameterClass;

namespace tensorlogic::calls {

// A Python tensor, as PyTorch lays it out.
struct Held {
  PyObject_HEAD
  at::Tensor tensor;
};
inline const at::Tensor& tensor_of(PyObject* given) { return reinterpret_cast<Held*>(given)->tensor; }

// A tensor, or a parameter, of no other subclass.
inline bool exactly_tensor(PyObject* given) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(given));
  return type == THPVariableClass || type == ParameterClass;
}

bool any_tensor(PyObject* given);         // or of a subclass
PyObject* wrapped(at::Tensor&& tensor);   // the Python tensor; null with an error
at::Tensor taken(AtenTensorHandle owned);  // what a kernel of the native library made
void translated();                        // sets the error that PyTorch would for the exception in flight
bool traced();                            // whether torch.jit.trace is listening
bool default_devices();  // the only function modes: they fill in device arguments that were left out, and launchers leave out none

// Without the interpreter's lock while it lives.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  ~Unlocked() { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

}  // namespace tensorlogic::calls
