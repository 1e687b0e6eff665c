// Kernels of GPUs and tensors for them, as Python objects.
#include "device.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/Dtype.h>

#include <structmember.h>

#include <algorithm>
#include <cstring>

namespace tensorlogic::calls {

thread_local PyObject* tape = nullptr;

at::Tensor Driver::made(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype,
                        int index) const {
  if (!empty) return at::Tensor(at::detail::empty_strided_cpu(size, stride, dtype));
  return at::Tensor(empty(size, stride, dtype, device(index)));
}

PyObject* note(PyObject* callable, PyObject* const* given, size_t n, PyObject* slot) {
  const Ref args(PyTuple_New(static_cast<Py_ssize_t>(n)));
  if (!args.get()) return nullptr;
  for (size_t i = 0; i < n; ++i)
    PyTuple_SET_ITEM(args.get(), static_cast<Py_ssize_t>(i), Py_NewRef(given[i]));
  const Ref entry(PyTuple_Pack(3, callable, args.get(), slot));
  if (!entry.get() || PyList_Append(tape, entry.get()) < 0) return nullptr;
  return Py_NewRef(slot);
}

namespace {

// Drivers --------------------------------------------------------------------------------------

PyObject* make_driver(PyTypeObject* type, PyObject* args, PyObject*) {
  unsigned long long launch = 0, stream = 0, capturing = 0, empty = 0, copy = 0, graph = 0;
  if (!PyArg_ParseTuple(args, "KKKK|KK", &launch, &stream, &capturing, &empty, &copy, &graph))
    return nullptr;
  if (!launch || !stream || !capturing) {
    PyErr_SetString(PyExc_ValueError, "a driver has functions to launch, for streams and captures");
    return nullptr;
  }
  auto* self = reinterpret_cast<Driver*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->launch = reinterpret_cast<decltype(self->launch)>(launch);
  self->stream = reinterpret_cast<decltype(self->stream)>(stream);
  self->capturing = reinterpret_cast<decltype(self->capturing)>(capturing);
  self->empty = reinterpret_cast<decltype(self->empty)>(empty);
  self->copy = reinterpret_cast<decltype(self->copy)>(copy);
  self->graph = reinterpret_cast<decltype(self->graph)>(graph);
  return reinterpret_cast<PyObject*>(self);
}

void forget_driver(PyObject* object) { Py_TYPE(object)->tp_free(object); }

// Slots ----------------------------------------------------------------------------------------

PyObject* make_slot(PyTypeObject* type, PyObject*, PyObject*) { return type->tp_alloc(type, 0); }

int undecided(PyObject*) {
  PyErr_SetString(PyExc_TypeError, "a launcher that is noted decided by an argument");
  return -1;
}

PyObject* incomparable(PyObject* a, PyObject*, int) {
  undecided(a);
  return nullptr;
}

PyNumberMethods slot_numbers = [] {
  PyNumberMethods made{};
  made.nb_bool = &undecided;
  return made;
}();

// Tensors --------------------------------------------------------------------------------------

PyObject* emptied(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Empty*>(object);
  if (names || PyVectorcall_NARGS(flags) != 3 || !THPDtype_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "empty takes a shape, strides and a dtype");
    return nullptr;
  }
  if (tape) {
    const Ref slot(SlotType.tp_alloc(&SlotType, 0));
    return slot.get() ? note(object, given, 3, slot.get()) : nullptr;
  }
  std::vector<int64_t> both[2];
  for (int i = 0; i < 2; ++i)
    if (!numbers(given[i], both[i])) return nullptr;
  try {
    return wrapped(self.driver->made(
        both[0], both[1], reinterpret_cast<THPDtype*>(given[2])->scalar_type, self.index));
  } catch (...) {
    translated();
    return nullptr;
  }
}

// Empty(driver, index)
PyObject* make_empty(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* driver = nullptr;
  int index = 0;
  if (!PyArg_ParseTuple(args, "O!i", &DriverType, &driver, &index)) return nullptr;
  auto* self = reinterpret_cast<Empty*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &emptied;
  self->driver = reinterpret_cast<Driver*>(Py_NewRef(driver));
  self->index = index;
  return reinterpret_cast<PyObject*>(self);
}

void forget_empty(PyObject* object) {
  Py_XDECREF(reinterpret_cast<PyObject*>(reinterpret_cast<Empty*>(object)->driver));
  Py_TYPE(object)->tp_free(object);
}

// Kernels --------------------------------------------------------------------------------------

// The tensor map of a matrix at `address`, copied.
bool mapped(PyObject* maps, uint64_t address, unsigned char* out) {
  const Ref key(PyLong_FromUnsignedLongLong(address));
  if (!key.get()) return false;
  const Ref map(PyObject_GetItem(maps, key.get()));
  if (!map.get()) return false;
  if (!PyBytes_CheckExact(map.get()) || PyBytes_GET_SIZE(map.get()) != MAP_BYTES) {
    PyErr_SetString(PyExc_TypeError, "a tensor map is 128 bytes");
    return false;
  }
  std::memcpy(out, PyBytes_AS_STRING(map.get()), MAP_BYTES);
  return true;
}

// 1: all that is given is in `words`, 0: less aligned than the kernel was built for, -1: an error is set.
int filled(const Start& self, PyObject* const* given, uint64_t* words, unsigned char (*maps)[MAP_BYTES]) {
  uint64_t bits = 0;
  int at = 0, matrices = 0;
  for (size_t i = 0; i < self.layout->size(); ++i) {
    const char kind = (*self.layout)[i];
    if (kind == 'm' || kind == 'p') {
      words[i] = reinterpret_cast<uint64_t>(tensor_of(given[at++]).data_ptr());
      bits |= words[i];
    } else if (kind == 'f') {
      const auto value = static_cast<float>(PyFloat_AsDouble(given[at++]));
      words[i] = 0;
      std::memcpy(&words[i], &value, sizeof value);
    } else if (kind == 'l') {
      words[i] = static_cast<uint64_t>(PyLong_AsLongLong(given[at++]));
    }
    if ((kind == 'f' || kind == 'l') && PyErr_Occurred()) return -1;
  }
  if (bits & self.mask) return 0;
  for (size_t i = 0; matrices < PyTuple_GET_SIZE(self.maps); ++i)
    if ((*self.layout)[i] == 'm') {
      if (!mapped(PyTuple_GET_ITEM(self.maps, matrices), words[i], maps[matrices])) return -1;
      ++matrices;
    }
  return 1;
}

int usually(const Start& self, PyObject* const* given) {
  const Ref done(PyObject_Vectorcall(self.usual, given, static_cast<size_t>(self.given), nullptr));
  return done.get() ? PyObject_IsTrue(done.get()) : -1;
}

// The driver's status.
int launched(const Start& self, uint64_t* words, unsigned char (*maps)[MAP_BYTES]) {
  void* arguments[WORDS + 2];
  const size_t n = self.layout->size();
  for (size_t i = 0, matrix = 0; i < n; ++i)
    arguments[i] = (*self.layout)[i] == 'm' ? static_cast<void*>(maps[matrix++]) : &words[i];
  at::Tensor space;
  uint64_t scratch[2] = {0, 0};  // for the kernel and for who profiles it
  if (self.scratch) {
    const int64_t one = 1;
    space = self.driver->made({self.scratch}, {one}, at::kByte, self.index);
    scratch[0] = reinterpret_cast<uint64_t>(space.data_ptr());
  }
  arguments[n] = &scratch[0];
  arguments[n + 1] = &scratch[1];
  Config config = self.config;
  Attribute attributes[2] = {self.attributes[0], self.attributes[1]};
  config.attributes = attributes;
  if (const int status = self.driver->stream(self.index, &config.stream)) return status;
  const Unlocked unlocked;  // the driver waits where a stream's queue is full
  return self.driver->launch(&config, self.function, arguments, nullptr);
}

PyObject* started(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Start*>(object);
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  if (names || n != self.given)
    return PyErr_Format(PyExc_TypeError, "a kernel of %d arguments was given %zd", self.given, n);
  if (tape) return note(object, given, static_cast<size_t>(n), Py_True);
  const int done = start(self, given);
  return done < 0 ? nullptr : PyBool_FromLong(done);
}

bool number(PyObject* value, char kind, uint64_t& word) {
  const long long given = PyLong_AsLongLong(value);
  if (given == -1 && PyErr_Occurred()) return false;
  word = kind == 'i' ? static_cast<uint32_t>(given) : static_cast<uint64_t>(given);
  return true;
}

void forget_start(PyObject* object) {
  auto* self = reinterpret_cast<Start*>(object);
  Py_XDECREF(self->usual);
  Py_XDECREF(reinterpret_cast<PyObject*>(self->driver));
  Py_XDECREF(self->maps);
  delete self->layout;
  delete[] self->fixed;
  Py_TYPE(object)->tp_free(object);
}

// Reads `layout` and its constants; false with an error set.
bool laid(Start& self, const char* layout, PyObject* constants) {
  Py_ssize_t constant = 0, matrices = 0;
  for (const char* kind = layout; *kind; ++kind) {
    const auto i = static_cast<size_t>(kind - layout);
    if (!strchr("mpfliL", *kind) || i >= WORDS) {
      PyErr_Format(PyExc_ValueError, "a kernel cannot be laid out as %s", layout);
      return false;
    }
    matrices += *kind == 'm';
    if (*kind == 'i' || *kind == 'L') {
      if (constant >= PyTuple_GET_SIZE(constants) ||
          !number(PyTuple_GET_ITEM(constants, constant++), *kind, self.fixed[i])) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "too few constants");
        return false;
      }
    } else {
      ++self.given;
    }
  }
  if (matrices != PyTuple_GET_SIZE(self.maps) || matrices > MAPS ||
      constant != PyTuple_GET_SIZE(constants)) {
    PyErr_Format(PyExc_ValueError, "a kernel laid out as %s has other constants or matrices", layout);
    return false;
  }
  return true;
}

// Start(usual, driver, (index, several), function, grid, (warps, shared), (cooperative, dependent),
//       (mask, scratch), layout, constants, maps)
PyObject* make_start(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *usual = nullptr, *driver = nullptr, *constants = nullptr, *maps = nullptr;
  int index = 0, several = 0, cooperative = 0, dependent = 0;
  unsigned warps = 0;
  unsigned long long function = 0, mask = 0;
  long long scratch = 0;
  const char* layout = nullptr;
  Config config{};
  if (!PyArg_ParseTuple(args, "OO!(ip)K(III)(II)(pp)(KL)sO!O!", &usual, &DriverType, &driver, &index,
                        &several, &function, &config.grid[0], &config.grid[1], &config.grid[2],
                        &warps, &config.shared, &cooperative, &dependent, &mask, &scratch, &layout,
                        &PyTuple_Type, &constants, &PyTuple_Type, &maps))
    return nullptr;
  auto* self = reinterpret_cast<Start*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &started;
  self->usual = Py_NewRef(usual);
  self->driver = reinterpret_cast<Driver*>(Py_NewRef(driver));
  self->maps = Py_NewRef(maps);
  self->index = index;
  self->several = several != 0;
  self->function = reinterpret_cast<void*>(function);
  self->mask = mask;
  self->scratch = scratch;
  self->layout = new std::string(layout);
  self->fixed = new uint64_t[WORDS]();
  config.block[0] = 32 * warps;
  config.block[1] = config.block[2] = 1;
  if (dependent) self->attributes[config.count++] = {PROGRAMMATIC, 0, {1}};
  if (cooperative) self->attributes[config.count++] = {COOPERATIVE, 0, {1}};
  self->config = config;
  if (laid(*self, layout, constants)) return reinterpret_cast<PyObject*>(self);
  Py_DECREF(self);
  return nullptr;
}

PyMemberDef start_members[] = {
    {"usual", T_OBJECT, offsetof(Start, usual), READONLY, "the same through Triton's launcher"},
    {nullptr, 0, 0, 0, nullptr}};

// Steps ----------------------------------------------------------------------------------------

struct Step {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* run;
};

PyObject* stepped(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  PyObject* run = reinterpret_cast<Step*>(object)->run;
  if (!tape) return PyObject_Vectorcall(run, given, flags, names);
  return note(run, given, static_cast<size_t>(PyVectorcall_NARGS(flags)), Py_True);
}

PyObject* make_step(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* run = nullptr;
  if (!PyArg_ParseTuple(args, "O", &run)) return nullptr;
  auto* self = reinterpret_cast<Step*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &stepped;
  self->run = Py_NewRef(run);
  return reinterpret_cast<PyObject*>(self);
}

void forget_step(PyObject* object) {
  Py_XDECREF(reinterpret_cast<Step*>(object)->run);
  Py_TYPE(object)->tp_free(object);
}

}  // namespace

int start(const Start& self, PyObject* const* given) {
  int at = 0;
  for (const char kind : *self.layout) {
    if ((kind == 'm' || kind == 'p') && !exactly_tensor(given[at])) return usually(self, given);
    at += kind != 'i' && kind != 'L';
  }
  uint64_t words[WORDS];
  alignas(64) unsigned char maps[MAPS][MAP_BYTES];
  std::copy(self.fixed, self.fixed + self.layout->size(), words);
  try {
    const int ready = filled(self, given, words, maps);
    if (ready <= 0) return ready;
    if (!self.config.grid[0] || !self.config.grid[1] || !self.config.grid[2]) return 1;
    std::optional<c10::DeviceGuard> there;
    if (self.several) there.emplace(self.driver->device(self.index));
    if (launched(self, words, maps) == 0) return 1;
  } catch (...) {
    translated();
    return -1;
  }
  // Nothing was started: the usual way gives this thread a context where it has none, or says why not.
  return usually(self, given);
}

PyTypeObject DriverType =
    type("tensorlogic_calls.Driver", sizeof(Driver), 0, &make_driver, &forget_driver,
         "Driver(launch, stream, capturing, empty[, copy, graph]): addresses of functions; empty 0: for CPU "
         "tensors; copy and graph 0: no way to a graph can be made");
PyTypeObject EmptyType =
    type("tensorlogic_calls.Empty", sizeof(Empty), offsetof(Empty, vectorcall), &make_empty,
         &forget_empty, "Empty(driver, index): (shape, strides, dtype) -> a tensor there");
PyTypeObject StartType = [] {
  PyTypeObject made = type(
    "tensorlogic_calls.Start", sizeof(Start), offsetof(Start, vectorcall), &make_start, &forget_start,
    "Start(usual, driver, (index, several), function, grid, (warps, shared), (cooperative, dependent), "
    "(mask, scratch), layout, constants, maps): (*tensors, *numbers) -> bool. A letter of `layout` for "
    "each of the kernel's arguments: a matrix by its tensor map (m), a pointer (p), a constant of 32 (i) "
    "or 64 bits (L), a float (f) or an integer (l) that is given with the call");
  made.tp_members = start_members;
  return made;
}();
PyTypeObject StepType = type("tensorlogic_calls.Step", sizeof(Step), offsetof(Step, vectorcall),
                             &make_step, &forget_step, "Step(run): run, which a plan may note");
PyTypeObject SlotType = [] {
  PyTypeObject made = type("tensorlogic_calls.Slot", sizeof(PyObject), 0, &make_slot, &forget_driver,
                           "Slot(): what a launcher is noted with; it can only be passed on");
  made.tp_as_number = &slot_numbers;
  made.tp_richcompare = &incomparable;
  made.tp_hash = &PyObject_HashNotImplemented;
  return made;
}();

}  // namespace tensorlogic::calls
