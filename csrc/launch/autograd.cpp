// Calls whose gradients are recorded: what torch.autograd.Function's forward does around a launcher.
#include "device.h"

#include <algorithm>

namespace tensorlogic::calls {
namespace {

struct Recording {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* slow;    // the same in Python: for what this one does not do, and what backward asks
  PyObject* apply;   // the Function's
  PyObject* launch;  // arguments -> outputs or None
  std::vector<int>* kept;     // of the arguments and, behind them, the outputs; -1: None
  std::vector<int>* scalars;  // arguments that are no tensors
  bool outside;               // of captures only
};

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Recording*>(object);
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  if (names || n >= MOST)
    return PyErr_Format(PyExc_TypeError, "a recording of at most %d arguments was given %zd", MOST, n);
  if (self.outside && captured(self.launch)) Py_RETURN_NONE;
  PyObject* args[MOST + 1] = {object};
  std::copy(given, given + n, args + 1);
  return PyObject_Vectorcall(self.apply, args, static_cast<size_t>(n + 1), nullptr);
}

// record.forward(ctx, *given) in Python.
PyObject* slowly(PyObject* record, PyObject* ctx, PyObject* const* given, Py_ssize_t n) {
  static PyObject* const name = PyUnicode_InternFromString("forward");
  PyObject* all[MOST + 2] = {record, ctx};
  std::copy(given, given + n, all + 2);
  return PyObject_VectorcallMethod(name, all, static_cast<size_t>(n + 2), nullptr);
}

PyObject* picked(const std::vector<int>& places, PyObject* const* given, Py_ssize_t n,
                 PyObject* outputs) {
  PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(places.size()));
  for (size_t i = 0; made && i < places.size(); ++i) {
    PyObject* item = places[i] < 0   ? Py_None
                     : places[i] < n ? given[places[i]]
                                     : PyTuple_GET_ITEM(outputs, places[i] - n);
    PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), Py_NewRef(item));
  }
  return made;
}

// The same outputs, the first of which is no view: PyTorch lets nobody write to one that a Function returns.
Ref viewless(Ref outputs) {
  PyObject* const first = PyTuple_GET_ITEM(outputs.get(), 0);
  if (!any_tensor(first) || !tensor_of(first).is_view()) return outputs;
  const Py_ssize_t n = PyTuple_GET_SIZE(outputs.get());
  Ref made(PyTuple_New(n));
  if (!made.get()) return made;
  PyTuple_SET_ITEM(made.get(), 0, wrapped(tensor_of(first).variable_data()));
  for (Py_ssize_t i = 1; i < n; ++i)
    PyTuple_SET_ITEM(made.get(), i, Py_NewRef(PyTuple_GET_ITEM(outputs.get(), i)));
  return made;
}

bool set(PyObject* ctx, PyObject* name, PyObject* value) {
  const Ref held(value);
  return value && PyObject_SetAttr(ctx, name, value) == 0;
}

PyObject* forward(const Recording& self, PyObject* ctx, PyObject* const* given, Py_ssize_t count) {
  Ref outputs(PyObject_Vectorcall(self.launch, given, static_cast<size_t>(count), nullptr));
  if (!outputs.get() && !out_of_memory()) return nullptr;
  if (!outputs.get()) PyErr_Clear();
  const int most = self.kept->empty() ? -1 : *std::max_element(self.kept->begin(), self.kept->end());
  if (!outputs.get() || !PyTuple_CheckExact(outputs.get()) ||
      most >= count + PyTuple_GET_SIZE(outputs.get()))
    return slowly(self.slow, ctx, given, count);
  outputs = viewless(std::move(outputs));
  if (!outputs.get()) return nullptr;
  static PyObject* const save = PyUnicode_InternFromString("save_for_backward");
  static PyObject* const record = PyUnicode_InternFromString("record");
  static PyObject* const scalars = PyUnicode_InternFromString("scalars");
  const Ref kept(picked(*self.kept, given, count, outputs.get()));
  const Ref method(PyObject_GetAttr(ctx, save));
  if (!kept.get() || !method.get() || !set(ctx, record, Py_NewRef(self.slow)) ||
      !set(ctx, scalars, picked(*self.scalars, given, count, outputs.get())))
    return nullptr;
  const Ref saved(PyObject_CallObject(method.get(), kept.get()));
  return saved.get() ? Py_NewRef(PyTuple_GET_ITEM(outputs.get(), 0)) : nullptr;
}

bool places(PyObject* given, std::vector<int>& out) {
  std::vector<int64_t> found;
  if (!numbers(given, found)) return false;
  out.assign(found.begin(), found.end());
  return true;
}

// Recording(slow, apply, launch, kept, scalars, outside)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *slow = nullptr, *apply = nullptr, *launch = nullptr, *kept = nullptr, *scalars = nullptr;
  int outside = 0;
  if (!PyArg_ParseTuple(args, "OOOOOp", &slow, &apply, &launch, &kept, &scalars, &outside))
    return nullptr;
  if (outside && Py_TYPE(launch) != &PlanType)
    return PyErr_Format(PyExc_TypeError, "only a plan knows whether it is captured, not %R", launch);
  std::vector<int> both[2];
  if (!places(kept, both[0]) || !places(scalars, both[1])) return nullptr;
  auto* self = reinterpret_cast<Recording*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->slow = Py_NewRef(slow);
  self->apply = Py_NewRef(apply);
  self->launch = Py_NewRef(launch);
  self->kept = new std::vector<int>(both[0]);
  self->scalars = new std::vector<int>(both[1]);
  self->outside = outside != 0;
  return reinterpret_cast<PyObject*>(self);
}

void forget(PyObject* object) {
  auto* self = reinterpret_cast<Recording*>(object);
  Py_XDECREF(self->slow);
  Py_XDECREF(self->apply);
  Py_XDECREF(self->launch);
  delete self->kept;
  delete self->scalars;
  Py_TYPE(object)->tp_free(object);
}

}  // namespace

PyObject* forwarded(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n < 2 || n > MOST + 2)
    return PyErr_Format(PyExc_TypeError, "forward takes a context, a recording and arguments");
  if (Py_TYPE(args[1]) != &RecordingType) return slowly(args[1], args[0], args + 2, n - 2);
  return forward(*reinterpret_cast<Recording*>(args[1]), args[0], args + 2, n - 2);
}

PyTypeObject RecordingType = [] {
  PyTypeObject made =
      type("tensorlogic_calls.Recording", sizeof(Recording), offsetof(Recording, vectorcall), &make,
           &forget, "Recording(slow, apply, launch, kept, scalars, outside): arguments -> apply(self, *arguments)");
  return made;
}();

}  // namespace tensorlogic::calls
