// Whether what a graph was recorded for is still as it was: tensors where they lay, attributes what they were.
#include <cmath>

#include "../launch/device.h"
#include "tensor_guard.h"

namespace tensorlogic::calls {
namespace {

// Tensors -----------------------------------------------------------------------------------------

struct Place {
  at::ScalarType dtype;
  at::Device device;
  std::vector<int64_t> sizes, strides;
};

// Still(tensors, state, watched, versions)
struct Still {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject *tensors, *watched;  // tuples
  std::vector<Place>* places;
  std::vector<int64_t>*state, *versions;  // addresses, then whether gradients are wanted where that counts
};

const at::Tensor& at_(PyObject* tuple, size_t i) {
  return tensor_of(PyTuple_GET_ITEM(tuple, static_cast<Py_ssize_t>(i)));
}

bool placed(const Place& place, const at::Tensor& t) {
  return t.scalar_type() == place.dtype && t.device() == place.device && t.layout() == at::kStrided &&
         !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && t.sizes() == at::IntArrayRef(place.sizes) &&
         t.strides() == at::IntArrayRef(place.strides);
}

bool unmoved(const Still& self) {
  const size_t n = self.places->size();
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& t = at_(self.tensors, i);
    if (!placed((*self.places)[i], t) || reinterpret_cast<int64_t>(t.const_data_ptr()) != (*self.state)[i] ||
        (self.state->size() > n && t.requires_grad() != ((*self.state)[n + i] != 0)))
      return false;
  }
  for (size_t i = 0; i < self.versions->size(); ++i)
    if (static_cast<int64_t>(at_(self.watched, i)._version()) != (*self.versions)[i]) return false;
  return true;
}

PyObject* asked_still(PyObject* object, PyObject* const*, size_t flags, PyObject* names) {
  const auto& self = *reinterpret_cast<Still*>(object);
  if (names || PyVectorcall_NARGS(flags)) return PyErr_Format(PyExc_TypeError, "a Still takes no arguments");
  if (!self.tensors) Py_RETURN_FALSE;  // it is being collected
  try {
    return PyBool_FromLong(unmoved(self));
  } catch (...) {
    translated();
    return nullptr;
  }
}

// A tensor of PyTorch's own type or a Parameter, whose layout may be read as it lies.
bool own(PyObject* tensor) {
  static PyObject* const parameter = [] {
    const Ref module(PyImport_ImportModule("torch.nn"));
    PyObject* found = module.get() ? PyObject_GetAttrString(module.get(), "Parameter") : nullptr;
    PyErr_Clear();
    return found;
  }();
  const bool exact = exactly_tensor(tensor) || reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == parameter;
  if (!exact || !any_tensor(tensor)) return false;
  const at::Tensor& t = tensor_of(tensor);
  return t.layout() == at::kStrided && !t.unsafeGetTensorImpl()->has_symbolic_sizes_strides() && !t.is_nested();
}

PyObject* make_still(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *tensors = nullptr, *state = nullptr, *watched = nullptr, *versions = nullptr;
  if (!PyArg_ParseTuple(args, "O!OO!O", &PyTuple_Type, &tensors, &state, &PyTuple_Type, &watched, &versions)) return nullptr;
  auto* self = reinterpret_cast<Still*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  const Ref owner(reinterpret_cast<PyObject*>(self));
  self->vectorcall = &asked_still;
  self->places = new std::vector<Place>;
  self->state = new std::vector<int64_t>;
  self->versions = new std::vector<int64_t>;
  if (!numbers(state, *self->state) || !numbers(versions, *self->versions)) return nullptr;
  for (PyObject* all : {tensors, watched})
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(all); ++i)
      if (!own(PyTuple_GET_ITEM(all, i))) return PyErr_Format(PyExc_TypeError, "plain tensors are required");
  const auto n = static_cast<size_t>(PyTuple_GET_SIZE(tensors));
  if ((self->state->size() != n && self->state->size() != 2 * n) ||
      self->versions->size() != static_cast<size_t>(PyTuple_GET_SIZE(watched)))
    return PyErr_Format(PyExc_TypeError, "an address for each tensor and a version for each watched one are required");
  for (size_t i = 0; i < n; ++i) {
    const at::Tensor& t = at_(tensors, i);
    self->places->push_back({t.scalar_type(), t.device(), t.sizes().vec(), t.strides().vec()});
  }
  self->tensors = Py_NewRef(tensors);
  self->watched = Py_NewRef(watched);
  return Py_NewRef(owner.get());
}

int visit_still(PyObject* object, visitproc visit, void* arg) {
  auto* self = reinterpret_cast<Still*>(object);
  Py_VISIT(self->tensors);
  Py_VISIT(self->watched);
  return 0;
}

int clear_still(PyObject* object) {
  auto* self = reinterpret_cast<Still*>(object);
  Py_CLEAR(self->tensors);
  Py_CLEAR(self->watched);
  return 0;
}

void forget_still(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear_still(object);
  auto* self = reinterpret_cast<Still*>(object);
  delete self->places;
  delete self->state;
  delete self->versions;
  Py_TYPE(object)->tp_free(object);
}

// Attributes --------------------------------------------------------------------------------------

struct Unchanged {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* lists;  // a tuple of these
  at::ScalarType dtype;
  bool deterministic;
};
enum List { EMPTY, SPACES, SIZES, MODULES, KINDS, KNOWN, NAMES, GETTERS, VALUES, CONTAINERS, CONTENTS, LISTS };

PyObject* item(const Unchanged& self, List list, Py_ssize_t i) {
  return PyList_GET_ITEM(PyTuple_GET_ITEM(self.lists, list), i);
}
Py_ssize_t count(const Unchanged& self, List list) { return PyList_GET_SIZE(PyTuple_GET_ITEM(self.lists, list)); }

int equal(PyObject* kept, PyObject* now);

// Of two lists or tuples, or two dicts, of which `kept` is nobody else's to change; as `equal`.
int equal_items(PyObject* kept, PyObject* now) {
  const Py_ssize_t n = PySequence_Fast_GET_SIZE(kept);
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (PySequence_Fast_GET_SIZE(now) != n) return 0;  // comparing may run anybody's code
    if (const int same = equal(PySequence_Fast_GET_ITEM(kept, i), PySequence_Fast_GET_ITEM(now, i)); same <= 0) return same;
  }
  return PySequence_Fast_GET_SIZE(now) == n;
}

int equal_dicts(PyObject* kept, PyObject* now) {
  if (PyDict_GET_SIZE(kept) != PyDict_GET_SIZE(now)) return 0;
  PyObject *key = nullptr, *value = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(kept, &at, &key, &value);) {
    PyObject* found = PyDict_GetItemWithError(now, key);
    if (!found) return PyErr_Occurred() ? -1 : 0;
    if (const int same = equal(value, found); same <= 0) return same;
  }
  return 1;
}

// Whether equal numbers are one number: 2 and 2.0 are not, nor 0.0 and -0.0.
bool one_number(PyObject* kept, PyObject* now) {
  const bool real = PyFloat_Check(kept), complex = PyComplex_Check(kept);
  if (!real && !complex && !PyLong_Check(kept)) return true;
  if (Py_TYPE(kept) != Py_TYPE(now)) return false;
  const auto signs = [](double a, double b) { return std::signbit(a) == std::signbit(b); };
  if (real) return signs(PyFloat_AS_DOUBLE(kept), PyFloat_AS_DOUBLE(now));
  return !complex || (signs(PyComplex_RealAsDouble(kept), PyComplex_RealAsDouble(now)) &&
                      signs(PyComplex_ImagAsDouble(kept), PyComplex_ImagAsDouble(now)));
}

// 1: equal, by identity or as `kept` says, 0: not, -1: an error is set.
int equal(PyObject* kept, PyObject* now) {
  if (kept == now) return 1;
  const Ref held = Ref::of(now);  // comparing may run anybody's code
  if (Py_TYPE(kept) == Py_TYPE(now)) {
    if (PyTuple_CheckExact(kept) || PyList_CheckExact(kept)) return equal_items(kept, now);
    if (PyDict_CheckExact(kept)) return equal_dicts(kept, now);
  }
  const int same = PyObject_RichCompareBool(kept, now, Py_EQ);
  return same > 0 ? one_number(kept, now) : same;
}

// The values under these names, of which `kept` has the first once more; as `equal`.
int looked_up(PyObject* known, PyObject* names, PyObject* kept) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* now = PyDict_GetItemWithError(known, PyTuple_GET_ITEM(names, i));
    if (!now) return PyErr_Occurred() ? -1 : 0;
    if (const int same = equal(PyTuple_GET_ITEM(kept, i), now); same <= 0) return same;
  }
  return 1;
}

int holds(const Unchanged& self) {
  for (Py_ssize_t i = 0; i < count(self, EMPTY); ++i)
    if (PyDict_GET_SIZE(item(self, EMPTY, i))) return 0;
  if (c10::get_default_dtype_as_scalartype() != self.dtype) return 0;
  if (at::globalContext().deterministicAlgorithms() != self.deterministic) return 0;
  for (Py_ssize_t i = 0; i < count(self, MODULES); ++i)
    if (reinterpret_cast<PyObject*>(Py_TYPE(item(self, MODULES, i))) != item(self, KINDS, i)) return 0;
  for (Py_ssize_t i = 0; i < count(self, SPACES); ++i)
    if (PyDict_GET_SIZE(item(self, SPACES, i)) != PyLong_AsSsize_t(item(self, SIZES, i))) return 0;
  for (Py_ssize_t i = 0; i < count(self, KNOWN); ++i) {
    PyObject *known = item(self, KNOWN, i), *names = item(self, NAMES, i), *kept = item(self, VALUES, i);
    int same = 0;
    if (PyTuple_GET_SIZE(names)) {
      same = looked_up(known, names, kept);
    } else {
      const Ref now(PyObject_CallOneArg(item(self, GETTERS, i), known));
      same = now.get() ? equal(kept, now.get()) : -1;
    }
    if (same <= 0) return same;
  }
  for (Py_ssize_t i = 0; i < count(self, CONTAINERS); ++i)
    if (const int same = equal(item(self, CONTENTS, i), item(self, CONTAINERS, i)); same <= 0) return same;
  return 1;
}

PyObject* asked_unchanged(PyObject* object, PyObject* const*, size_t flags, PyObject* names) {
  const auto& self = *reinterpret_cast<Unchanged*>(object);
  if (names || PyVectorcall_NARGS(flags)) return PyErr_Format(PyExc_TypeError, "an Unchanged takes no arguments");
  if (!self.lists) Py_RETURN_FALSE;  // it is being collected
  const int same = holds(self);
  if (same >= 0) return PyBool_FromLong(same);
  for (PyObject* kind : {PyExc_KeyError, PyExc_AttributeError, PyExc_RuntimeError, PyExc_ValueError})  // deleted, or equality of arrays
    if (PyErr_ExceptionMatches(kind)) {
      PyErr_Clear();
      Py_RETURN_FALSE;
    }
  return nullptr;
}

bool all(PyObject* list, PyTypeObject* type, bool exactly = true) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    PyObject* one = PyList_GET_ITEM(list, i);
    if (Py_TYPE(one) != type && (exactly || !PyObject_TypeCheck(one, type))) return false;
  }
  return true;
}

// Names to be looked up are of a plain dict, and what was found there is a tuple, the first of it once more in the end.
bool findable(PyObject* const* lists) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(lists[NAMES]); ++i) {
    PyObject *names = PyList_GET_ITEM(lists[NAMES], i), *kept = PyList_GET_ITEM(lists[VALUES], i);
    const Py_ssize_t n = PyTuple_GET_SIZE(names);
    if (n && (!PyDict_CheckExact(PyList_GET_ITEM(lists[KNOWN], i)) || !PyTuple_CheckExact(kept) || PyTuple_GET_SIZE(kept) != n + 1))
      return false;
  }
  return true;
}

// Of dicts that must be empty; of dicts and how many items they must have; of objects and their types; of what is looked up by names or
// asked by getters and the values that must be found; of containers and what they must equal.
PyObject* make_unchanged(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* lists[LISTS];
  if (PyTuple_GET_SIZE(args) != LISTS) return PyErr_Format(PyExc_TypeError, "%d lists are required", LISTS);
  for (Py_ssize_t i = 0; i < LISTS; ++i) {
    lists[i] = PyTuple_GET_ITEM(args, i);
    if (!PyList_CheckExact(lists[i])) return PyErr_Format(PyExc_TypeError, "lists are required, not %R", lists[i]);
  }
  const auto alike = [&](List a, List b) { return PyList_GET_SIZE(lists[a]) == PyList_GET_SIZE(lists[b]); };
  if (!all(lists[EMPTY], &PyDict_Type, false) || !all(lists[SPACES], &PyDict_Type) || !all(lists[SIZES], &PyLong_Type) ||
      !all(lists[NAMES], &PyTuple_Type) || !alike(SPACES, SIZES) || !alike(MODULES, KINDS) || !alike(KNOWN, NAMES) ||
      !alike(KNOWN, GETTERS) || !alike(KNOWN, VALUES) || !alike(CONTAINERS, CONTENTS) || !findable(lists))
    return PyErr_Format(PyExc_TypeError, "dicts, and as many sizes, kinds, names, values and contents as there are owners, are required");
  auto* self = reinterpret_cast<Unchanged*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  const Ref owner(reinterpret_cast<PyObject*>(self));
  self->vectorcall = &asked_unchanged;
  self->dtype = c10::get_default_dtype_as_scalartype();
  self->deterministic = at::globalContext().deterministicAlgorithms();
  self->lists = PyTuple_New(LISTS);
  for (Py_ssize_t i = 0; self->lists && i < LISTS; ++i) {
    PyObject* copy = PyList_GetSlice(lists[i], 0, PyList_GET_SIZE(lists[i]));  // nobody else's to change
    if (!copy) return nullptr;
    PyTuple_SET_ITEM(self->lists, i, copy);
  }
  return self->lists ? Py_NewRef(owner.get()) : nullptr;
}

int visit_unchanged(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(reinterpret_cast<Unchanged*>(object)->lists);
  return 0;
}

int clear_unchanged(PyObject* object) {
  Py_CLEAR(reinterpret_cast<Unchanged*>(object)->lists);
  return 0;
}

void forget_unchanged(PyObject* object) {
  PyObject_GC_UnTrack(object);
  clear_unchanged(object);
  Py_TYPE(object)->tp_free(object);
}

}  // namespace

PyTypeObject StillType = [] {
  PyTypeObject made = type("tensorlogic_calls.Still", sizeof(Still), offsetof(Still, vectorcall), &make_still, &forget_still,
                           "Still(tensors, state, watched, versions): () -> whether the tensors look as they do now, lie at the "
                           "addresses of `state` (and want gradients as its second half says), and `watched` have these versions");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit_still;
  made.tp_clear = &clear_still;
  return made;
}();
PyTypeObject UnchangedType = [] {
  PyTypeObject made =
      type("tensorlogic_calls.Unchanged", sizeof(Unchanged), offsetof(Unchanged, vectorcall), &make_unchanged,
           &forget_unchanged,
           "Unchanged(empty, spaces, sizes, modules, kinds, known, names, getters, values, containers, contents): () -> "
           "whether all these dicts are empty, these have their sizes, the modules are of their kinds, values are found as "
           "they were, containers equal their contents, and PyTorch's default dtype and whether it is deterministic are today's");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit_unchanged;
  made.tp_clear = &clear_unchanged;
  return made;
}();

}  // namespace tensorlogic::calls
