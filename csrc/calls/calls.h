// A Python module, built per version of PyTorch and of Python, optional: warm calls without the layers
// of Python and of PyTorch's dispatcher.
#pragma once

#include "python.h"

#include <utility>
#include <vector>

#include "../undispatched.h"

namespace tensorlogic::calls {

constexpr int REVISION = 8;  // of what the package expects of this module, as in tensorlogic/native/call_extension.py
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

// A tuple or list of integers; false with an error set where it is none.
inline bool numbers(PyObject* given, std::vector<int64_t>& out) {
  const Ref items(PySequence_Fast(given, "integers are required"));
  if (!items.get()) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.get()); ++i)
    out.push_back(PyLong_AsLongLong(PySequence_Fast_GET_ITEM(items.get(), i)));
  return !PyErr_Occurred();
}

// A type; `vectorcall` is where its objects keep theirs, 0: they cannot be called.
inline PyTypeObject type(const char* name, size_t size, size_t vectorcall, newfunc make,
                         destructor forget, const char* doc) {
  PyTypeObject made{};
  Py_SET_REFCNT(reinterpret_cast<PyObject*>(&made), 1);
  made.tp_name = name;
  made.tp_basicsize = static_cast<Py_ssize_t>(size);
  made.tp_flags = Py_TPFLAGS_DEFAULT;
  if (vectorcall) {
    made.tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
    made.tp_vectorcall_offset = static_cast<Py_ssize_t>(vectorcall);
    made.tp_call = &PyVectorcall_Call;
  }
  made.tp_new = make;
  made.tp_dealloc = forget;
  made.tp_doc = doc;
  return made;
}

// forward(ctx, recording, *arguments): the first output, with what backward needs kept in ctx.
PyObject* forwarded(PyObject* module, PyObject* const* args, Py_ssize_t n);

extern PyTypeObject NativeType, LauncherType, FrontType;

}  // namespace tensorlogic::calls
