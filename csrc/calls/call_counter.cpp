// Any callable, counted: what serves a call until somebody wants to look.
#include "../launch/device.h"

#include <structmember.h>

namespace tensorlogic::calls {
namespace {

struct Counted {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* serve;
  PyObject* look;  // takes the call once `left` of them have been served
  int64_t left;
};

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Counted*>(object);
  const Ref call = Ref::of(--self.left < 0 ? self.look : self.serve);
  return PyObject_Vectorcall(call.get(), given, flags, names);
}

// Counted(serve, look, left)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *serve = nullptr, *look = nullptr;
  long long left = 0;
  if (!PyArg_ParseTuple(args, "OOL", &serve, &look, &left)) return nullptr;
  auto* self = reinterpret_cast<Counted*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->serve = Py_NewRef(serve);
  self->look = Py_NewRef(look);
  self->left = left;
  return reinterpret_cast<PyObject*>(self);
}

// `look` refers to the object that it is of: without these two, neither would ever be freed.
int visit(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Counted*>(object);
  Py_VISIT(self->serve);
  Py_VISIT(self->look);
  return 0;
}

int clear(PyObject* object) {
  Py_CLEAR(reinterpret_cast<Counted*>(object)->look);
  return 0;
}

void forget(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<Counted*>(object);
  Py_XDECREF(self->serve);
  Py_XDECREF(self->look);
  Py_TYPE(object)->tp_free(object);
}

PyMemberDef members[] = {
    {"left", T_LONGLONG, offsetof(Counted, left), 0, "calls until look is asked"},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

PyTypeObject CountedType = [] {
  PyTypeObject made =
      type("tensorlogic_calls.Counted", sizeof(Counted), offsetof(Counted, vectorcall), &make,
           &forget, "Counted(serve, look, left): arguments -> serve(*arguments), look(*arguments) after `left` of them");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit;
  made.tp_clear = &clear;
  made.tp_members = members;
  return made;
}();

}  // namespace tensorlogic::calls
