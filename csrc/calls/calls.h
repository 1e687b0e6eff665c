// A Python module, built per version of PyTorch and of Python, optional: warm calls without the layers
// of Python and of PyTorch's dispatcher.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/python_variable.h>

#include <vector>

#include "../direct.h"

namespace tensorlogic::calls {

constexpr int MOST = 16;  // arguments

// Owns one reference.
class Ref {
 public:
  Ref() = default;
  static Ref of(PyObject* p) { return Ref(Py_XNewRef(p)); }
  explicit Ref(PyObject* stolen) : p_(stolen) {}
  Ref(Ref&& other) noexcept : p_(std::exchange(other.p_, nullptr)) {}
  Ref(const Ref& other) : p_(Py_XNewRef(other.p_)) {}
  Ref& operator=(Ref other) noexcept {
    std::swap(p_, other.p_);
    return *this;
  }
  ~Ref() { Py_XDECREF(p_); }
  PyObject* get() const { return p_; }

 private:
  PyObject* p_ = nullptr;
};

// An operator of the native library, called past the dispatcher where that would do nothing.
struct Native {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  const Direct* direct;
  PyObject* usual;  // the same through the dispatcher
  int arguments;
  Argument defaults[MOST];
  bool has_default[MOST];
};

// A native operator with one output whose last arguments are fixed.
struct Launcher {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* native;
  PyObject* fixed;  // a tuple
  int dynamic;
  Argument values[MOST];  // from `dynamic` on
  PyObject* look;         // null, or who takes the call once `left` of them have been served
  int64_t left;
};

// The output of a launcher, or null: with an error set where it failed, without where the call needs
// another way: through the dispatcher, or by who is watching.
PyObject* launch(Launcher& self, PyObject* const* tensors);

extern PyTypeObject NativeType, LauncherType, FrontType;

}  // namespace tensorlogic::calls
