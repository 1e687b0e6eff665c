// The short way to a CUDA graph: a call like an earlier one is checked, its inputs are copied in, the graph is launched and
// its outputs are handed back, in one call of C.
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>

#include "device.h"
#include "seen.h"

namespace tensorlogic::calls {
namespace {

constexpr size_t INPUTS = 64;  // the most

// The memory of a tensor without gaps, which may be copied as it lies.
struct Memory {
  at::Tensor tensor;
  size_t bytes = 0;

  bool whole() const { return tensor.defined(); }
  uint64_t place() const { return reinterpret_cast<uint64_t>(tensor.const_data_ptr()); }
};

struct Input {
  Seen seen;
  Memory buffer;  // not whole: PyTorch copies
  Ref copy;       // buffer.copy_
};

struct Output {
  Ref leaf;
  Memory memory;  // not whole: PyTorch copies it, or nobody
  Ref clone;      // leaf.clone, or null: the leaf itself is handed out
  size_t first = 0;  // of the leaves that are this very object
  std::vector<int64_t> size, stride;
};

// Everything that a call needs; each Ref is visited below.
struct Road {
  Ref driver, tape, line, acquire, release, turn, variable, policy, force, compiler, level, shape, before, after, miss, usual;
  int index = 0;
  bool several = false;  // devices: the current one may be another
  bool grad = false;
  void* graph = nullptr;  // null: the tape is asked to replay
  bool leaf = false;      // the one output is all that is handed out
  std::vector<Input> inputs;
  std::vector<Output> outputs;

  const Driver& on() const { return *reinterpret_cast<Driver*>(driver.get()); }
  template <typename Use>
  int each(Use use) {
    for (Ref* ref : {&driver, &tape, &line, &acquire, &release, &turn, &variable, &policy, &force, &compiler, &level, &shape,
                     &before, &after, &miss, &usual})
      if (const int stop = use(*ref)) return stop;
    for (Input& input : inputs)
      if (const int stop = use(input.copy)) return stop;
    for (Output& output : outputs)
      for (Ref* ref : {&output.leaf, &output.clone})
        if (const int stop = use(*ref)) return stop;
    return 0;
  }
};

struct Way {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Road* road;
};

// How far a call came.
enum class Came { THROUGH, MISSED, USUAL, FAILED };

bool asked(const Ref& what, Came& came) {
  const Ref held(PyObject_CallNoArgs(what.get()));
  const int holds = held.get() ? PyObject_IsTrue(held.get()) : -1;
  if (holds <= 0) came = holds < 0 ? Came::FAILED : Came::MISSED;
  return holds > 0;
}

bool called(const Ref& what, PyObject* const* given = nullptr, size_t n = 0) {
  return Ref(PyObject_Vectorcall(what.get(), given, n, nullptr)).get() != nullptr;
}

// The lock of the buffers, if no other thread has it.
class Turn {
 public:
  explicit Turn(const Road& road) : road_(road) {
    PyObject* const wait[] = {Py_False};
    const Ref got(PyObject_Vectorcall(road.acquire.get(), wait, 1, nullptr));
    came = !got.get() ? Came::FAILED : got.get() == Py_True ? Came::THROUGH : Came::MISSED;
  }
  ~Turn() {
    if (came != Came::THROUGH) return;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (!called(road_.release)) PyErr_WriteUnraisable(road_.release.get());
    PyErr_Restore(type, value, trace);
  }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  Came came;

 private:
  const Road& road_;
};

// The driver waits where a stream's queue is full; others run meanwhile.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() { PyEval_RestoreThread(state_); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// Nothing traces or transforms calls; false also where that cannot be told.
bool executed(const Road& road) {
  static PyObject* const name = PyUnicode_InternFromString("_is_compiling_flag");
  if (PyDict_GetItemWithError(road.compiler.get(), name) != Py_False || torch::jit::tracer::isTracing()) return false;
  return Ref(PyObject_CallNoArgs(road.level.get())).get() == Py_None;
}

bool same_force(const Road& road) {
  PyObject* found = nullptr;
  if (PyContextVar_Get(road.variable.get(), nullptr, &found) < 0) return false;
  const Ref policy(found);
  if (policy.get() == road.policy.get()) return true;
  const Ref force(policy.get() ? PyObject_GetAttrString(policy.get(), "force") : nullptr);
  return force.get() && PyObject_RichCompareBool(force.get(), road.force.get(), Py_EQ) == 1;
}

bool fits(const Road& road, PyObject* const* given) {
  if (c10::GradMode::is_enabled() != road.grad || !unobserved()) return false;
  const auto local = c10::impl::tls_local_dispatch_key_set();
  for (size_t i = 0; i < road.inputs.size(); ++i)
    if (!same(road.inputs[i].seen, given[i], local) || road.inputs[i].seen.first != first_of(given, i))
      return false;
  return executed(road) && same_force(road);
}

// On the stream of the call, after what the last one still does with the buffers.
bool turned(const Road& road, void* stream) {
  static PyObject* const name = PyUnicode_InternFromString("raw");
  const Ref raw(PyObject_GetAttr(road.line.get(), name));
  if (!raw.get()) return false;
  const uint64_t last = PyLong_AsUnsignedLongLongMask(raw.get());
  if (PyErr_Occurred()) return false;
  return last == reinterpret_cast<uint64_t>(stream) || called(road.turn);
}

// Whether all that the tensor claims lies in its storage.
bool held(const at::Tensor& t, const Memory& buffer) {
  const size_t before = static_cast<size_t>(t.storage_offset()) * t.element_size();
  return t.unsafeGetTensorImpl()->unsafe_storage().nbytes() >= before + buffer.bytes && t.const_data_ptr();
}

// Copies the inputs in and starts the graph.
Came launched(const Road& road, PyObject* const* given, void* stream) {
  std::array<uint64_t, INPUTS> from{};
  for (size_t i = 0; i < road.inputs.size(); ++i) {
    const Input& input = road.inputs[i];
    if (!input.buffer.whole()) {
      if (!called(input.copy, given + i, 1)) return Came::FAILED;
    } else if (input.buffer.bytes) {
      const at::Tensor& t = THPVariable_Unpack(given[i]);
      if (!held(t, input.buffer)) return Came::USUAL;
      from[i] = reinterpret_cast<uint64_t>(t.const_data_ptr());
    }
  }
  const Driver& driver = road.on();
  int status = 0;
  {
    const Unlocked unlocked;
    for (size_t i = 0; !status && i < road.inputs.size(); ++i) {
      const Memory& buffer = road.inputs[i].buffer;
      if (from[i] && from[i] != buffer.place())
        status = driver.copy(buffer.place(), from[i], buffer.bytes, stream);
    }
    if (!status && road.graph) status = driver.graph(road.graph, stream);
  }
  if (status) return Came::USUAL;
  if (road.graph) return Came::THROUGH;
  static PyObject* const replay = PyUnicode_InternFromString("replay");
  return Ref(PyObject_CallMethodNoArgs(road.tape.get(), replay)).get() ? Came::THROUGH : Came::FAILED;
}

// The caller's own of one output, null with an error or where the driver refuses.
PyObject* owned(const Road& road, const Output& output, void* stream, Came& came) {
  if (!output.clone.get()) return Py_NewRef(output.leaf.get());
  if (!output.memory.whole()) return PyObject_CallNoArgs(output.clone.get());
  const Driver& driver = road.on();
  at::Tensor made = driver.made(output.size, output.stride, output.memory.tensor.scalar_type(), road.index);
  int status = 0;
  if (output.memory.bytes) {
    const auto to = reinterpret_cast<uint64_t>(made.mutable_data_ptr());
    const Unlocked unlocked;
    status = driver.copy(to, output.memory.place(), output.memory.bytes, stream);
  }
  if (!status) return THPVariable_Wrap(std::move(made));
  came = Came::USUAL;
  return nullptr;
}

PyObject* handed(const Road& road, void* stream, Came& came) {
  came = Came::FAILED;
  if (road.leaf) {
    PyObject* one = owned(road, road.outputs[0], stream, came);
    if (one) came = Came::THROUGH;
    return one;
  }
  const auto n = static_cast<Py_ssize_t>(road.outputs.size());
  const bool tuple = road.shape.get() == reinterpret_cast<PyObject*>(&PyTuple_Type);
  Ref all(tuple ? PyTuple_New(n) : PyList_New(n));
  for (Py_ssize_t i = 0; all.get() && i < n; ++i) {
    const auto first = static_cast<Py_ssize_t>(road.outputs[i].first);
    PyObject* one = first == i ? owned(road, road.outputs[i], stream, came)
                               : Py_NewRef(tuple ? PyTuple_GET_ITEM(all.get(), first)
                                                 : PyList_GET_ITEM(all.get(), first));
    if (!one) return nullptr;
    if (tuple)
      PyTuple_SET_ITEM(all.get(), i, one);
    else
      PyList_SET_ITEM(all.get(), i, one);
  }
  if (!all.get()) return nullptr;
  const bool made = tuple || road.shape.get() == reinterpret_cast<PyObject*>(&PyList_Type);
  PyObject* out = made ? Py_NewRef(all.get()) : PyObject_CallOneArg(road.shape.get(), all.get());
  if (out) came = Came::THROUGH;
  return out;
}

Came served(const Road& road, PyObject* const* given, PyObject** out) {
  if (!fits(road, given)) return Came::MISSED;
  if (at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION).has_value()) return Came::USUAL;
  const Driver& driver = road.on();
  std::optional<c10::DeviceGuard> there;
  if (road.several) there.emplace(driver.device(road.index));
  void* stream = nullptr;
  int capturing = 0;
  if (driver.stream(road.index, &stream) || driver.capturing(stream, &capturing)) return Came::USUAL;
  if (capturing) return Came::MISSED;
  Came came = Came::THROUGH;
  if (road.before.get() != Py_None && !asked(road.before, came)) return came;
  const Turn turn(road);
  if (turn.came != Came::THROUGH) return turn.came;
  const c10::AutoGradMode unrecorded(false);
  if (!turned(road, stream)) return Came::FAILED;
  came = launched(road, given, stream);
  if (came == Came::THROUGH && (road.after.get() == Py_None || asked(road.after, came)))
    *out = handed(road, stream, came);
  return came;
}

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  const Road& road = *reinterpret_cast<Way*>(object)->road;
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  if (!road.usual.get())  // it is being collected
    return PyErr_Format(PyExc_RuntimeError, "this way to a graph is gone");
  Came came = Came::MISSED;
  PyObject* out = nullptr;
  if (!names && static_cast<size_t>(n) == road.inputs.size()) try {
      came = served(road, given, &out);
    } catch (...) {
      translated();
      return nullptr;
    }
  if (came == Came::USUAL) return PyObject_Vectorcall(road.usual.get(), given, flags, names);
  if (came == Came::MISSED && PyErr_Occurred()) PyErr_Clear();  // of who compared
  return came == Came::MISSED ? Py_NewRef(road.miss.get()) : out;
}

// Ways made --------------------------------------------------------------------------------------

// Of a tensor that plain memory copies serve: no gaps, nothing lazy about its numbers, on the device.
Memory memory(const at::Tensor& t, at::Device device) {
  static const c10::DispatchKeySet modes = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  const c10::DispatchKeySet bare(device.is_cpu() ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  const bool here = t.device().type() == device.type() && (device.is_cpu() || t.device().index() == device.index());
  if (!here || t.key_set() - modes != bare || !t.is_non_overlapping_and_dense()) return {};
  return {t, static_cast<size_t>(t.numel()) * t.element_size()};
}

bool refused(const char* what) {
  PyErr_SetString(PyExc_TypeError, what);
  return false;
}

bool entered(Road& road, PyObject* example, PyObject* buffers) {
  const Py_ssize_t n = PyTuple_GET_SIZE(example);
  if (n != PyTuple_GET_SIZE(buffers) || static_cast<size_t>(n) > INPUTS) return refused("as many buffers as inputs, at most 64");
  PyObject* const* given = &PyTuple_GET_ITEM(example, 0);
  const auto local = c10::impl::tls_local_dispatch_key_set();
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* buffer = PyTuple_GET_ITEM(buffers, i);
    if (!plain(given[i]) || !plain(buffer)) return refused("plain tensors are required");
    const at::Tensor& from = THPVariable_Unpack(given[i]);
    const at::Tensor& to = THPVariable_Unpack(buffer);
    Input input;
    input.seen = looked(given, static_cast<size_t>(i), local);
    const bool alike = to.sizes() == from.sizes() && to.strides() == from.strides() && to.dtype() == from.dtype();
    const at::Device device = road.on().device(road.index);
    if (alike && memory(from, device).whole()) input.buffer = memory(to, device);
    input.copy = Ref(PyObject_GetAttrString(buffer, "copy_"));
    if (!input.copy.get()) return false;
    road.inputs.push_back(std::move(input));
  }
  return true;
}

bool left(Road& road, PyObject* leaves, bool own) {
  const Py_ssize_t n = PyTuple_GET_SIZE(leaves);
  if (road.leaf && n != 1) return refused("one output is a leaf");
  for (Py_ssize_t i = 0; i < n; ++i) {
    PyObject* leaf = PyTuple_GET_ITEM(leaves, i);
    Output output;
    output.leaf = Ref::of(leaf);
    output.first = first_of(&PyTuple_GET_ITEM(leaves, 0), static_cast<size_t>(i));
    if (own && THPVariable_Check(leaf)) {
      output.clone = Ref(PyObject_GetAttrString(leaf, "clone"));
      if (!output.clone.get()) return false;
      const at::Tensor& t = THPVariable_Unpack(leaf);
      if (plain(leaf) && !t.requires_grad()) output.memory = memory(t, road.on().device(road.index));
      if (output.memory.whole()) output.size = t.sizes().vec(), output.stride = t.strides().vec();
    }
    road.outputs.push_back(std::move(output));
  }
  return true;
}

bool method(PyObject* of, const char* name, Ref& to) {
  to = Ref(PyObject_GetAttrString(of, name));
  return to.get() != nullptr;
}

// Way(driver, (index, several), graph, tape, line, (variable, policy, compiler, level), examples, buffers, leaves, shape,
//     own, before, after, miss, usual)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *driver, *tape, *line, *variable, *policy, *compiler, *level, *examples, *buffers, *leaves, *shape, *before, *after,
      *miss, *usual;
  int index = 0, several = 0, own = 0;
  unsigned long long graph = 0;
  if (!PyArg_ParseTuple(args, "O!(ip)KOO(OOO!O)O!O!O!OpOOOO", &DriverType, &driver, &index, &several, &graph, &tape,
                        &line, &variable, &policy, &PyDict_Type, &compiler, &level, &PyTuple_Type, &examples, &PyTuple_Type,
                        &buffers, &PyTuple_Type, &leaves, &shape, &own, &before, &after, &miss, &usual))
    return nullptr;
  auto* self = reinterpret_cast<Way*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  const Ref owner(reinterpret_cast<PyObject*>(self));
  self->vectorcall = static_cast<vectorcallfunc>(&called);
  Road& road = *(self->road = new Road);
  road.index = index;
  road.several = several != 0;
  road.graph = reinterpret_cast<void*>(graph);
  road.grad = c10::GradMode::is_enabled();
  road.leaf = shape == Py_None;
  const std::pair<Ref*, PyObject*> kept[] = {
      {&road.driver, driver}, {&road.tape, tape},     {&road.line, line},       {&road.variable, variable},
      {&road.policy, policy}, {&road.shape, shape},   {&road.compiler, compiler}, {&road.before, before},
      {&road.after, after},   {&road.miss, miss},     {&road.usual, usual},   {&road.level, level}};
  for (const auto& [to, from] : kept) *to = Ref::of(from);
  if (!road.on().copy || !road.on().graph || !PyContextVar_CheckExact(variable)) {
    refused("a driver that copies and launches graphs and a context variable are required");
    return nullptr;
  }
  const Ref lock(PyObject_GetAttrString(line, "lock"));
  if (!lock.get() || !method(lock.get(), "acquire", road.acquire) || !method(lock.get(), "release", road.release) ||
      !method(line, "turn", road.turn) || !method(policy, "force", road.force) || !entered(road, examples, buffers) ||
      !left(road, leaves, own != 0))
    return nullptr;
  return Py_NewRef(owner.get());
}

int visit(PyObject* object, visitproc visit, void* arg) {
  Road* road = reinterpret_cast<Way*>(object)->road;
  return road ? road->each([&](const Ref& ref) { return ref.get() ? visit(ref.get(), arg) : 0; }) : 0;
}

int clear(PyObject* object) {
  Road* road = reinterpret_cast<Way*>(object)->road;
  return road ? road->each([](Ref& ref) {
    ref = Ref();
    return 0;
  })
              : 0;
}

void forget(PyObject* object) {
  PyObject_GC_UnTrack(object);
  delete reinterpret_cast<Way*>(object)->road;
  Py_TYPE(object)->tp_free(object);
}

}  // namespace

PyTypeObject WayType = [] {
  PyTypeObject made =
      type("tensorlogic_calls.Way", sizeof(Way), offsetof(Way, vectorcall), &make, &forget,
           "Way(driver, (index, several), graph, tape, line, (variable, policy, compiler, level), examples, buffers, "
           "leaves, shape, own, before, after, miss, usual): (*tensors) -> what the graph gives, or `miss` of a call unlike the "
           "examples. `shape`: None (one leaf), tuple, list, or what is called with a list of leaves; `usual` is the same "
           "in Python, for what is unusual and to say what the driver refuses");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit;
  made.tp_clear = &clear;
  return made;
}();

}  // namespace tensorlogic::calls
