// A product and its guard in one call of the native library, and who is asked where the guard is not certain.
#include "../launch/device.h"

#include <structmember.h>

namespace tensorlogic::calls {
namespace {

struct Guarded {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* otherwise;
  PyObject* way;  // None, or (held, run, left, right, rest, served, name)
};

// 1 where `told` says so, 0 where it does not; -1: an error is set.
int certain(PyObject* told) {
  if (!exactly_tensor(told)) {
    PyErr_SetString(PyExc_TypeError, "a guarded product returns two tensors");
    return -1;
  }
  return *static_cast<const double*>(tensor_of(told).const_data_ptr()) == 1;
}

// served[0] = name
bool noted(PyObject* served, PyObject* name) {
  if (PyList_GET_SIZE(served) == 1) return PyList_SetItem(served, 0, Py_NewRef(name)) == 0;
  const Ref one(PyList_New(1));
  if (!one.get()) return false;
  PyList_SET_ITEM(one.get(), 0, Py_NewRef(name));
  return PyList_SetSlice(served, 0, PyList_GET_SIZE(served), one.get()) == 0;
}

PyObject* asked(const Guarded& self, PyObject* held, PyObject* y, PyObject* const* given, size_t n) {
  PyObject* all[MOST + 2] = {held, y};
  std::copy(given, given + n, all + 2);
  return PyObject_Vectorcall(self.otherwise, all, n + 2, nullptr);
}

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Guarded*>(object);
  const auto n = static_cast<size_t>(PyVectorcall_NARGS(flags));
  if (names || n > MOST) return PyErr_Format(PyExc_TypeError, "at most %d arguments, and none by name", MOST);
  const Ref way = Ref::of(self.way);  // another thread may choose again meanwhile
  if (way.get() == Py_None) return asked(self, Py_None, Py_None, given, n);
  PyObject *held, *run, *rest, *served, *name;
  int left = 0, right = 0;
  if (!PyArg_ParseTuple(way.get(), "OOiiO!O!O", &held, &run, &left, &right, &PyTuple_Type, &rest, &PyList_Type, &served, &name))
    return nullptr;
  const auto fixed = static_cast<size_t>(PyTuple_GET_SIZE(rest));
  if (left < 0 || right < 0 || std::max<size_t>(left, right) >= n || fixed + 2 > MOST)
    return PyErr_Format(PyExc_TypeError, "a guarded product of arguments %d and %d was given %zu", left, right, n);
  PyObject* all[MOST] = {given[left], given[right]};
  for (size_t i = 0; i < fixed; ++i) all[2 + i] = PyTuple_GET_ITEM(rest, static_cast<Py_ssize_t>(i));
  const Ref both(PyObject_Vectorcall(run, all, 2 + fixed, nullptr));
  if (!both.get()) return nullptr;
  PyObject *y, *told;
  if (!PyArg_ParseTuple(both.get(), "OO", &y, &told)) return nullptr;
  const int good = certain(told);
  if (good < 0) return nullptr;
  if (!good) return asked(self, held, y, given, n);
  return noted(served, name) ? Py_NewRef(y) : nullptr;
}

// Guarded(otherwise)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* otherwise = nullptr;
  if (!PyArg_ParseTuple(args, "O", &otherwise)) return nullptr;
  auto* self = reinterpret_cast<Guarded*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->otherwise = Py_NewRef(otherwise);
  self->way = Py_NewRef(Py_None);
  return reinterpret_cast<PyObject*>(self);
}

PyObject* way_of(PyObject* object, void*) { return Py_NewRef(reinterpret_cast<Guarded*>(object)->way); }

int set_way(PyObject* object, PyObject* way, void*) {
  if (!way || (way != Py_None && !PyTuple_CheckExact(way))) {
    PyErr_SetString(PyExc_TypeError, "way must be None or (held, run, left, right, rest, served, name)");
    return -1;
  }
  const Ref before(std::exchange(reinterpret_cast<Guarded*>(object)->way, Py_NewRef(way)));
  return 0;
}

// `otherwise` and `way` refer to whom they are of: without these two, none would ever be freed.
int visit(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Guarded*>(object)->otherwise);
  Py_VISIT(reinterpret_cast<Guarded*>(object)->way);
  return 0;
}

int clear(PyObject* object) {
  auto* self = reinterpret_cast<Guarded*>(object);
  const Ref before(std::exchange(self->way, Py_NewRef(Py_None)));
  return 0;
}

void forget(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<Guarded*>(object);
  Py_XDECREF(self->otherwise);
  Py_XDECREF(self->way);
  Py_TYPE(object)->tp_free(object);
}

PyGetSetDef attributes[] = {
    {"way", &way_of, &set_way,
     "None, or (held, run, left, right, rest, served, name): run(argument `left`, argument `right`, *rest) -> (output, 1.0 where its guard "
     "is certain); then served becomes [name]",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

}  // namespace

PyTypeObject GuardedType = [] {
  PyTypeObject made =
      type("tensorlogic_calls.Guarded", sizeof(Guarded), offsetof(Guarded, vectorcall), &make, &forget,
           "Guarded(otherwise): arguments -> the output of its way, or otherwise(held, output or None, *arguments)");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit;
  made.tp_clear = &clear;
  made.tp_getset = attributes;
  return made;
}();

}  // namespace tensorlogic::calls
