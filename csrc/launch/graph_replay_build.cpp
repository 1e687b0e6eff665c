// The short way to a CUDA graph: made of one call and what was recorded of it.
#include <c10/core/GradMode.h>

#include "graph_replay.h"

namespace tensorlogic::calls {
namespace {

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
    const at::Tensor& from = tensor_of(given[i]);
    const at::Tensor& to = tensor_of(buffer);
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
    if (own && any_tensor(leaf)) {
      output.clone = Ref(PyObject_GetAttrString(leaf, "clone"));
      if (!output.clone.get()) return false;
      const at::Tensor& t = tensor_of(leaf);
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

// Way(driver, (index, several), graph, tape, line, (variable, policy, compiler, level, forward), examples, buffers, leaves,
//     shape, own, before, after, miss, usual)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *driver, *tape, *line, *variable, *policy, *compiler, *level, *forward, *examples, *buffers, *leaves, *shape,
      *before, *after, *miss, *usual;
  int index = 0, several = 0, own = 0;
  unsigned long long graph = 0;
  if (!PyArg_ParseTuple(args, "O!(ip)KOO(OOO!OO!)O!O!O!OpOOOO", &DriverType, &driver, &index, &several, &graph, &tape,
                        &line, &variable, &policy, &PyDict_Type, &compiler, &level, &PyDict_Type, &forward, &PyTuple_Type,
                        &examples, &PyTuple_Type, &buffers, &PyTuple_Type, &leaves, &shape, &own, &before, &after, &miss, &usual))
    return nullptr;
  auto* self = reinterpret_cast<Way*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  const Ref owner(reinterpret_cast<PyObject*>(self));
  self->vectorcall = &ways_call;
  Road& road = *(self->road = new Road);
  road.index = index;
  road.several = several != 0;
  road.graph = reinterpret_cast<void*>(graph);
  road.grad = c10::GradMode::is_enabled();
  road.leaf = shape == Py_None;
  const std::pair<Ref*, PyObject*> kept[] = {
      {&road.driver, driver}, {&road.tape, tape},     {&road.line, line},       {&road.variable, variable},
      {&road.policy, policy}, {&road.shape, shape},   {&road.compiler, compiler}, {&road.before, before},
      {&road.after, after},   {&road.miss, miss},     {&road.usual, usual},   {&road.level, level},
      {&road.forward, forward}};
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
           "Way(driver, (index, several), graph, tape, line, (variable, policy, compiler, level, forward), examples, "
           "buffers, leaves, shape, own, before, after, miss, usual): (*tensors) -> what the graph gives, or `miss` of a call unlike the "
           "examples. `shape`: None (one leaf), tuple, list, or what is called with a list of leaves; `usual` is the same "
           "in Python, for what is unusual and to say what the driver refuses");
  made.tp_flags |= Py_TPFLAGS_HAVE_GC;
  made.tp_traverse = &visit;
  made.tp_clear = &clear;
  return made;
}();

}  // namespace tensorlogic::calls
