// The short way to a CUDA graph: a call like an earlier one is checked, its inputs are copied in, the graph is launched and
// its outputs are handed back, in one call of C.
#include <ATen/record_function.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/Dtype.h>

#include <array>

#include "graph_replay.h"

namespace tensorlogic::calls {
namespace {

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
  if (PyDict_GetItemWithError(road.compiler.get(), name) != Py_False || traced() || !underived(road.forward.get()))
    return false;
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
    if (!same(road.inputs[i].seen, given[i], local) || road.inputs[i].seen.first != first_of(given, i) || carries(given[i]))
      return false;
  return road.switches == Switches::now() && executed(road) && same_force(road);
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
      const at::Tensor& t = tensor_of(given[i]);
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
  if (!status) return wrapped(std::move(made));
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

}  // namespace

PyObject* ways_call(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
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

}  // namespace tensorlogic::calls
