// The warm way of a public function: its entries by policy, gradient mode and what tells tensors apart.
#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <cmath>
#include <string>
#include <unordered_map>

#include "../launch/device.h"
#include "tensor_guard.h"

namespace tensorlogic::calls {

using FunctionModes = at::impl::PythonTorchFunctionTLS;

bool unobserved() {
  return !(at::impl::torch_function_mode_enabled() && !default_devices()) &&
         c10::impl::TorchDispatchModeTLS::stack_len() == 0;
}

bool underived(PyObject* forward) {
  static PyObject* const name = PyUnicode_InternFromString("_current_level");
  PyObject* level = PyDict_GetItemWithError(forward, name);
  return level && PyLong_AsLong(level) < 0;
}

namespace {

struct Entry {
  Ref policy, run;
  int how = 0;  // of a plan
  bool grad = false;
  std::vector<Seen> tensors;  // in the order of parameters
  std::vector<Ref> flags;
};

using Entries = std::unordered_map<uint64_t, std::vector<Entry>>;

struct Front {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  std::string* kinds;
  PyObject* policy;   // the context variable
  PyObject* forward;  // the dict of torch.autograd.forward_ad
  Entries* entries;
  size_t count;
};

uint64_t mixed(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
  return hash ^ (hash >> 32);
}

// Flags of these types are compared without running anybody's code; others only with themselves.
bool simple(PyObject* flag) {
  if (PyTuple_CheckExact(flag)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(flag); ++i)
      if (!PyLong_CheckExact(PyTuple_GET_ITEM(flag, i))) return false;
    return true;
  }
  return PyLong_CheckExact(flag) || PyUnicode_CheckExact(flag) || PyFloat_CheckExact(flag);
}

bool equal(PyObject* kept, PyObject* given) {
  if (kept == given) return true;
  if (Py_TYPE(kept) != Py_TYPE(given) || !simple(kept) || !simple(given)) return false;
  return PyObject_RichCompareBool(kept, given, Py_EQ) == 1;
}

bool finite(PyObject* scalar) {
  return PyLong_CheckExact(scalar) ||
         (PyFloat_CheckExact(scalar) && std::isfinite(PyFloat_AS_DOUBLE(scalar)));
}

bool tensor(char kind) { return kind == 't' || kind == 'o'; }

// Of the tensors' sizes and types; false where an argument is none that an entry could be for.
bool hashed(const Front& self, PyObject* const* given, uint64_t& hash) {
  hash = 1;
  for (size_t i = 0; i < self.kinds->size(); ++i) {
    const char kind = (*self.kinds)[i];
    if (kind == 'o' && given[i] == Py_None) continue;
    if (tensor(kind)) {
      if (!plain(given[i])) return false;
      const at::Tensor& t = tensor_of(given[i]);
      hash = mixed(hash, static_cast<uint64_t>(t.scalar_type()));
      for (int64_t size : t.sizes()) hash = mixed(hash, static_cast<uint64_t>(size));
    } else if (kind == 's' && !finite(given[i])) {
      return false;
    }
  }
  return true;
}

bool matches(const Front& self, const Entry& entry, PyObject* policy, bool grad,
             const c10::impl::LocalDispatchKeySet& local, PyObject* const* given) {
  if (entry.policy.get() != policy || entry.grad != grad) return false;
  size_t tensors = 0, flags = 0;
  for (size_t i = 0; i < self.kinds->size(); ++i) {
    const char kind = (*self.kinds)[i];
    if (tensor(kind)) {
      const Seen& seen = entry.tensors[tensors++];
      if (!same(seen, given[i], local) || (seen.type && seen.first != first_of(given, i)))
        return false;
    }
    if (kind == 'f' && !equal(entry.flags[flags++].get(), given[i])) return false;
  }
  return true;
}

// What runs inside meets no function mode, as what a mode calls does not.
class Aside {
 public:
  explicit Aside(bool needed) : needed_(needed), before_(FunctionModes::get_disabled_state()) {
    if (needed) FunctionModes::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  }
  ~Aside() {
    if (needed_) FunctionModes::set_disabled_state(before_);
  }
  Aside(const Aside&) = delete;
  Aside& operator=(const Aside&) = delete;

 private:
  bool needed_;
  at::impl::TorchFunctionDisabledState before_;
};

// No mode wants to see the call, and no forward derivative is being taken.
bool alone(const Front& self) {
  return unobserved() && underived(self.forward);
}

Ref current(const Front& self) {
  PyObject* policy = nullptr;
  if (PyContextVar_Get(self.policy, nullptr, &policy) < 0) PyErr_Clear();
  return Ref(policy);
}

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Front*>(object);
  uint64_t hash = 0;
  if (names || static_cast<size_t>(PyVectorcall_NARGS(flags)) != self.kinds->size() ||
      self.entries->empty() || !hashed(self, given, hash) || !alone(self))
    Py_RETURN_NONE;
  const auto found = self.entries->find(hash);
  if (found == self.entries->end()) Py_RETURN_NONE;
  const Ref policy = current(self);
  const bool grad = c10::GradMode::is_enabled();
  const auto local = c10::impl::tls_local_dispatch_key_set();
  for (const Entry& entry : found->second) {
    if (!matches(self, entry, policy.get(), grad, local, given)) continue;
    const Ref run = entry.run;  // entries may be forgotten meanwhile
    const int how = entry.how;
    const Aside aside(at::impl::torch_function_mode_enabled());
    PyObject* dynamic[MOST];
    size_t n = 0;
    for (size_t i = 0; i < self.kinds->size(); ++i)
      if ((*self.kinds)[i] != 'f') dynamic[n++] = given[i];
    PyObject* y = nullptr;
    if (Py_TYPE(run.get()) == &LauncherType)
      y = launch(*reinterpret_cast<Launcher*>(run.get()), dynamic);
    else if (Py_TYPE(run.get()) != &PlanType)
      return PyObject_Vectorcall(run.get(), dynamic, n, nullptr);
    else if (!served(run.get(), dynamic, how, &y))
      return nullptr;
    if (y || PyErr_Occurred()) return y;
    break;
  }
  Py_RETURN_NONE;
}

// keep(policy, run, how, *arguments): serve later calls that look like this one by `run(*dynamic)`, by
// a Launcher past its tuple, or by a Plan as `how` says (1: all outputs, 2: not under capture).
PyObject* keep(PyObject* object, PyObject* const* args, Py_ssize_t n) {
  auto& self = *reinterpret_cast<Front*>(object);
  uint64_t hash = 0;
  PyObject* const* given = args + 3;
  if (static_cast<size_t>(n) != self.kinds->size() + 3 || !hashed(self, given, hash))
    Py_RETURN_FALSE;
  Entry made;
  made.how = static_cast<int>(PyLong_AsLong(args[2]));
  if (PyErr_Occurred()) return nullptr;
  made.policy = Ref::of(args[0]);
  made.run = Ref::of(args[1]);
  made.grad = c10::GradMode::is_enabled();
  const auto local = c10::impl::tls_local_dispatch_key_set();
  for (size_t i = 0; i < self.kinds->size(); ++i) {
    const char kind = (*self.kinds)[i];
    if (kind == 'f') made.flags.push_back(Ref::of(given[i]));
    if (!tensor(kind)) continue;
    Seen seen;
    if (given[i] != Py_None) seen = looked(given, i, local);
    made.tensors.push_back(std::move(seen));
  }
  constexpr size_t ENOUGH = 8192;
  if (self.count >= ENOUGH) {
    Entries().swap(*self.entries);
    self.count = 0;
  }
  (*self.entries)[hash].push_back(std::move(made));
  ++self.count;
  Py_RETURN_TRUE;
}

PyObject* clear(PyObject* object, PyObject*) {
  auto& self = *reinterpret_cast<Front*>(object);
  Entries dropped;
  dropped.swap(*self.entries);  // whose destructors may run Python
  self.count = 0;
  Py_RETURN_NONE;
}

// Front(kinds, policy, forward): a letter a parameter, "t"ensor, "o"ptional, "f"lag or "s"calar.
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  const char* kinds = nullptr;
  PyObject *policy = nullptr, *forward = nullptr;
  if (!PyArg_ParseTuple(args, "sOO!", &kinds, &policy, &PyDict_Type, &forward)) return nullptr;
  if (strlen(kinds) > MOST || !PyContextVar_CheckExact(policy))
    return PyErr_Format(PyExc_TypeError, "at most %d parameters, and a context variable", MOST);
  auto* self = reinterpret_cast<Front*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->kinds = new std::string(kinds);
  self->policy = Py_NewRef(policy);
  self->forward = Py_NewRef(forward);
  self->entries = new Entries;
  return reinterpret_cast<PyObject*>(self);
}

void forget(PyObject* object) {
  auto* self = reinterpret_cast<Front*>(object);
  delete self->kinds;
  delete self->entries;
  Py_XDECREF(self->policy);
  Py_XDECREF(self->forward);
  Py_TYPE(object)->tp_free(object);
}

PyMethodDef methods[] = {
    {"keep", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&keep)), METH_FASTCALL,
     "keep(policy, run, how, *arguments): serve later calls that look like this one"},
    {"clear", &clear, METH_NOARGS, "clear(): forget all entries"},
    {nullptr, nullptr, 0, nullptr}};

// record(notes): from now on launchers of this thread are noted in this list; None: they run.
PyObject* record(PyObject*, PyObject* notes) {
  if (notes != Py_None && !PyList_CheckExact(notes))
    return PyErr_Format(PyExc_TypeError, "notes are a list or None, not %R", notes);
  PyObject* before = std::exchange(tape, notes == Py_None ? nullptr : Py_NewRef(notes));
  Py_XDECREF(before);
  Py_RETURN_NONE;
}

// noted(what, *arguments): a slot for what `what` returns, of one stream ever the same, where launchers
// are noted; else None.
PyObject* noted(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (!tape) Py_RETURN_NONE;
  if (n < 1) return PyErr_Format(PyExc_TypeError, "noted takes what is called");
  const Ref slot(SlotType.tp_alloc(&SlotType, 0));
  return slot.get() ? note(args[0], args + 1, static_cast<size_t>(n - 1), slot.get()) : nullptr;
}

PyMethodDef functions[] = {
    {"forward", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&forwarded)), METH_FASTCALL,
     "forward(ctx, recording, *arguments): the first output, with what backward needs kept in ctx"},
    {"record", &record, METH_O, "record(notes): note launchers in this list, or let them run (None)"},
    {"noted", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&noted)), METH_FASTCALL,
     "noted(what, *arguments): a slot where launchers are noted, else None"},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tensorlogic_calls", nullptr, -1, functions,
                      nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyTypeObject FrontType = [] {
  PyTypeObject made =
      type("tensorlogic_calls.Front", sizeof(Front), offsetof(Front, vectorcall), &make, &forget,
           "Front(kinds, policy, forward): the output of a warm call, None of any other");
  made.tp_methods = methods;
  return made;
}();

}  // namespace tensorlogic::calls

PyMODINIT_FUNC PyInit_tensorlogic_calls() {
  using namespace tensorlogic::calls;
  PyObject* made = PyModule_Create(&module);
  if (!made) return nullptr;
  for (PyTypeObject* type : {&NativeType, &LauncherType, &FrontType, &DriverType,
                             &EmptyType, &StartType, &StepType, &SeriesType, &SlotType, &PlanType,
                             &RecordingType, &CountedType, &GuardedType, &WayType, &StillType,
                             &UnchangedType, &MoverType})
    if (PyModule_AddType(made, type) < 0) {
      Py_DECREF(made);
      return nullptr;
    }
  if (PyModule_AddIntConstant(made, "REVISION", REVISION) < 0) {
    Py_DECREF(made);
    return nullptr;
  }
  return made;
}
