// Native operators and launchers as Python objects.
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>

#include <structmember.h>

#include "calls.h"

namespace tensorlogic::calls {
namespace {

// What the dispatcher would look at before the CPU kernel, were there a reason to.
class Dispatcher {
 public:
  Dispatcher() : local_(c10::impl::tls_local_dispatch_key_set()), grad_(c10::GradMode::is_enabled()) {}

  // Nobody watches calls; profilers do.
  static bool unwatched() {
    return !at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value();
  }

  // The CPU kernel is all that a call with this tensor comes to.
  bool passes(const at::Tensor& t) const {
    static const c10::DispatchKeySet nothing =
        c10::autograd_dispatch_keyset_with_ADInplaceOrView |
        c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
    static const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    if (grad_ && t.requires_grad()) return false;
    return ((t.key_set() | local_.included_) - local_.excluded_) - nothing == cpu;
  }

 private:
  c10::impl::LocalDispatchKeySet local_;
  bool grad_;
};

AtenTensorHandle borrowed(PyObject* tensor) {
  return reinterpret_cast<AtenTensorHandle>(
      const_cast<at::Tensor*>(&tensor_of(tensor)));
}

// One argument that is no tensor; false where the usual way must look at it.
bool plain(char kind, PyObject* given, Argument& out) {
  switch (kind) {
    case 'i':
      if (!PyLong_CheckExact(given)) return false;
      out.integer = PyLong_AsLongLong(given);
      if (out.integer == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        return false;
      }
      return true;
    case 'b':
      if (!PyBool_Check(given)) return false;
      out.integer = given == Py_True;
      return true;
    case 'd':
      if (!PyFloat_CheckExact(given)) return false;
      out.real = PyFloat_AS_DOUBLE(given);
      return true;
    case 'c':
      if (!THPDtype_Check(given)) return false;
      out.integer = static_cast<int64_t>(reinterpret_cast<THPDtype*>(given)->scalar_type);
      return true;
    case 'o':
      out.tensor = nullptr;
      return given == Py_None;
    default:
      return false;
  }
}

bool argument(char kind, PyObject* given, const Dispatcher& dispatcher, Argument& out) {
  if (!exactly_tensor(given)) return plain(kind, given, out);
  if ((kind != 't' && kind != 'o') || !dispatcher.passes(tensor_of(given))) return false;
  out.tensor = borrowed(given);
  return true;
}

// Runs the kernel without the interpreter's lock; false with a Python error set where it threw.
bool run(const Direct& direct, const Argument* in, at::Tensor* out) {
  AtenTensorHandle handles[MOST] = {};
  try {
    {
      const Unlocked unlocked;
      direct.call(in, handles);
    }
    for (int i = 0; i < direct.outputs; ++i) out[i] = taken(handles[i]);
    return true;
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return false;
  }
}

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Native*>(object);
  const Direct& direct = *self.direct;
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  Argument in[MOST];
  const Dispatcher dispatcher;
  bool usual = names || n > self.arguments || !Dispatcher::unwatched();
  for (Py_ssize_t i = 0; !usual && i < self.arguments; ++i) {
    if (i < n)
      usual = !argument(direct.kinds[i], given[i], dispatcher, in[i]);
    else if (self.has_default[i])
      in[i] = self.defaults[i];
    else
      usual = true;
  }
  if (usual) return PyObject_Vectorcall(self.usual, given, flags, names);
  at::Tensor out[MOST];
  if (!run(direct, in, out)) return nullptr;
  if (direct.outputs == 0) Py_RETURN_NONE;
  if (direct.outputs == 1) return wrapped(std::move(out[0]));
  PyObject* all = PyTuple_New(direct.outputs);
  for (int i = 0; all && i < direct.outputs; ++i)
    PyTuple_SET_ITEM(all, i, wrapped(std::move(out[i])));
  return all;
}

void forget(PyObject* object) {
  auto* self = reinterpret_cast<Native*>(object);
  Py_XDECREF(self->usual);
  Py_TYPE(object)->tp_free(object);
}

// Native(name, usual, defaults): `defaults` is a tuple, one value for each of the last arguments.
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* name = nullptr;
  PyObject *usual = nullptr, *defaults = nullptr;
  if (!PyArg_ParseTuple(args, "sOO!", &name, &usual, &PyTuple_Type, &defaults)) return nullptr;
  const Direct* found = direct(name);
  const int count = found ? static_cast<int>(strlen(found->kinds)) : 0;
  const int fixed = static_cast<int>(PyTuple_GET_SIZE(defaults));
  if (!found || count > MOST || found->outputs > MOST || fixed > count)
    return PyErr_Format(PyExc_LookupError, "no direct call of %s", name);
  auto* self = reinterpret_cast<Native*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->direct = found;
  self->usual = Py_NewRef(usual);
  self->arguments = count;
  for (int i = 0; i < fixed; ++i) {
    const int at = count - fixed + i;
    self->has_default[at] =
        plain(found->kinds[at], PyTuple_GET_ITEM(defaults, i), self->defaults[at]);
  }
  return reinterpret_cast<PyObject*>(self);
}

// Launchers ------------------------------------------------------------------------------------

// Through the dispatcher.
PyObject* usually(const Launcher& self, PyObject* const* given) {
  PyObject* all[MOST];
  const Py_ssize_t fixed = PyTuple_GET_SIZE(self.fixed);
  std::copy(given, given + self.dynamic, all);
  for (Py_ssize_t i = 0; i < fixed; ++i) all[self.dynamic + i] = PyTuple_GET_ITEM(self.fixed, i);
  auto& native = *reinterpret_cast<Native*>(self.native);
  return PyObject_Vectorcall(native.usual, all, static_cast<size_t>(self.dynamic + fixed), nullptr);
}

PyObject* launched(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Launcher*>(object);
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  if (names || n != self.dynamic)
    return PyErr_Format(PyExc_TypeError, "a launcher of %d arguments was given %zd", self.dynamic, n);
  if (self.look && self.left <= 0) return PyObject_Vectorcall(self.look, given, flags, nullptr);
  PyObject* y = launch(self, given);
  if (!y && !PyErr_Occurred()) y = usually(self, given);
  if (!y) return nullptr;
  PyObject* outputs = PyTuple_New(1);
  if (outputs)
    PyTuple_SET_ITEM(outputs, 0, y);
  else
    Py_DECREF(y);
  return outputs;
}

// watched(look, left): the same, which hands a call to `look(*tensors)` once it has served `left` of
// them; `look` sets `left` anew.
PyObject* watched(PyObject* object, PyObject* args) {
  PyObject* look = nullptr;
  long long left = 0;
  if (!PyArg_ParseTuple(args, "OL", &look, &left)) return nullptr;
  PyObject* made = LauncherType.tp_alloc(&LauncherType, 0);
  if (!made) return nullptr;
  auto& from = *reinterpret_cast<Launcher*>(object);
  auto& to = *reinterpret_cast<Launcher*>(made);
  to.vectorcall = &launched;
  to.native = Py_NewRef(from.native);
  to.fixed = Py_NewRef(from.fixed);
  to.dynamic = from.dynamic;
  std::copy(from.values, from.values + MOST, to.values);
  to.look = Py_NewRef(look);
  to.left = left;
  return made;
}

// `look` refers to the launcher that it is of: without these two, neither would ever be freed.
int visit_launcher(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Launcher*>(object);
  Py_VISIT(self->fixed);
  Py_VISIT(self->look);
  return 0;
}

int clear_launcher(PyObject* object) {
  Py_CLEAR(reinterpret_cast<Launcher*>(object)->look);
  return 0;
}

void forget_launcher(PyObject* object) {
  PyObject_GC_UnTrack(object);
  auto* self = reinterpret_cast<Launcher*>(object);
  Py_XDECREF(self->native);
  Py_XDECREF(self->fixed);
  Py_XDECREF(self->look);
  Py_TYPE(object)->tp_free(object);
}

// Launcher(native, fixed): of the arguments after the first ones, which are tensors; what follows takes its default.
PyObject* make_launcher(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *native = nullptr, *fixed = nullptr;
  if (!PyArg_ParseTuple(args, "O!O!", &NativeType, &native, &PyTuple_Type, &fixed)) return nullptr;
  const Native& of = *reinterpret_cast<Native*>(native);
  const int given = static_cast<int>(PyTuple_GET_SIZE(fixed));
  const int leading = static_cast<int>(strspn(of.direct->kinds, "to"));
  const int left = std::max(0, of.arguments - leading - given);
  if (of.direct->outputs != 1 || given > of.arguments)
    return PyErr_Format(PyExc_TypeError, "one output and at most %d arguments", of.arguments);
  for (int at = of.arguments - left; at < of.arguments; ++at)
    if (!of.has_default[at]) return PyErr_Format(PyExc_TypeError, "argument %d must be fixed", at);
  auto* self = reinterpret_cast<Launcher*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &launched;
  self->native = Py_NewRef(native);
  self->fixed = Py_NewRef(fixed);
  self->dynamic = of.arguments - left - given;
  std::copy(of.defaults, of.defaults + MOST, self->values);
  for (int i = 0; i < given; ++i) {
    const int at = self->dynamic + i;
    if (plain(of.direct->kinds[at], PyTuple_GET_ITEM(fixed, i), self->values[at])) continue;
    Py_DECREF(self);
    return PyErr_Format(PyExc_TypeError, "argument %d cannot be fixed to %R", at,
                        PyTuple_GET_ITEM(fixed, i));
  }
  return reinterpret_cast<PyObject*>(self);
}

PyMethodDef launcher_methods[] = {
    {"watched", &watched, METH_VARARGS,
     "watched(look, left): the same, which hands a call to look(*tensors) after `left` of them"},
    {nullptr, nullptr, 0, nullptr}};
PyMemberDef launcher_members[] = {
    {"left", T_LONGLONG, offsetof(Launcher, left), 0, "calls until look is asked"},
    {nullptr, 0, 0, 0, nullptr}};

}  // namespace

PyObject* launch(Launcher& self, PyObject* const* tensors) {
  const Direct& direct = *reinterpret_cast<Native*>(self.native)->direct;
  if (!Dispatcher::unwatched() || (self.look && --self.left < 0)) return nullptr;
  Argument in[MOST];
  std::copy(self.values, self.values + MOST, in);
  const Dispatcher dispatcher;
  for (int i = 0; i < self.dynamic; ++i)
    if (!argument(direct.kinds[i], tensors[i], dispatcher, in[i])) return nullptr;
  at::Tensor out;
  return run(direct, in, &out) ? wrapped(std::move(out)) : nullptr;
}

PyTypeObject NativeType =
    type("tensorlogic_calls.Native", sizeof(Native), offsetof(Native, vectorcall), &make, &forget,
         "Native(name, usual, defaults): an operator of the native library, past the dispatcher");
PyTypeObject LauncherType = [] {
  PyTypeObject made = type("tensorlogic_calls.Launcher", sizeof(Launcher),
                           offsetof(Launcher, vectorcall), &make_launcher, &forget_launcher,
                           "Launcher(native, fixed): tensors -> (output,)");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit_launcher;
  made.tp_clear = &clear_launcher;
  made.tp_methods = launcher_methods;
  made.tp_members = launcher_members;
  return made;
}();

}  // namespace tensorlogic::calls
