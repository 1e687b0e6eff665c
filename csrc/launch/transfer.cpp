// Transfers of ordinary memory to and from a device in one call of C: threads copy while memory is still made for what they copy.
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <exception>

#include "../transfer.h"
#include "device.h"
#include "../calls/tensor_guard.h"

namespace tensorlogic::calls {
namespace {

constexpr int CLASSES = 3;  // of sizes

struct Mover {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Driver* driver;
  int index;
  bool up;
  long long stager, smallest;          // bytes that are moved here
  long long below[CLASSES - 1];        // bytes up to which a class goes
  transfer::How how[CLASSES];
};

// The result, made while the transfer is under way.
struct Result {
  const Mover& by;
  const c10::DimVector sizes, strides;
  const at::ScalarType dtype;
  at::Tensor tensor{};
  std::exception_ptr problem{};

  void make() {
    if (by.up) {
      tensor = by.driver->made(sizes, strides, dtype, by.index);
      return;
    }
    tensor = taken(
        transfer::memory(static_cast<int32_t>(dtype), sizes.data(), static_cast<int64_t>(sizes.size())));
  }
  static char* made(void* self) {
    auto& result = *static_cast<Result*>(self);
    try {
      result.make();
      return static_cast<char*>(result.tensor.mutable_data_ptr());
    } catch (...) {
      result.problem = std::current_exception();
      return nullptr;
    }
  }
};

// Whether a tensor of that type of device is nothing but its bytes: no gradient is recorded, no bit is to be turned when it is read.
bool bytes_alone(const at::Tensor& t, at::DeviceType type) {
  static const c10::DispatchKeySet nothing =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::DispatchKeySet(c10::DispatchKey::BackendSelect);
  const c10::DispatchKeySet backend(type == at::kCPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA);
  if (c10::GradMode::is_enabled() && t.requires_grad()) return false;
  return applied(t, c10::impl::tls_local_dispatch_key_set()) - nothing == backend;
}

// Whether the transfer is one for this mover, whose device is the current one.
bool takes(const Mover& self, PyObject* given, int64_t& bytes) {
  if (!plain(given) || !unobserved()) return false;
  const at::Tensor& t = tensor_of(given);
  const at::Device device = self.driver->device(self.index);
  const at::DeviceType from = self.up ? at::kCPU : device.type();
  bytes = static_cast<int64_t>(t.nbytes());
  if (t.device().type() != from || bytes < self.smallest || !t.is_contiguous() || !bytes_alone(t, from)) return false;
  if (device.is_cpu()) return true;
  if (!self.up && t.device().index() != device.index()) return false;
  return c10::impl::VirtualGuardImpl(device.type()).getDevice() == device && !(self.up && t.is_pinned());
}

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  const auto& self = *reinterpret_cast<Mover*>(object);
  int64_t bytes = 0;
  int capturing = 0;
  void* stream = nullptr;
  if (names || PyVectorcall_NARGS(flags) != 1) return PyErr_Format(PyExc_TypeError, "a mover takes one tensor");
  try {
    if (!takes(self, given[0], bytes) || self.driver->stream(self.index, &stream) || self.driver->capturing(stream, &capturing) || capturing)
      Py_RETURN_NONE;
    const at::Tensor from = tensor_of(given[0]);
    const c10::Storage kept = from.storage();  // another thread may give the tensor other memory meanwhile
    Result to{self, c10::DimVector(from.sizes()), c10::DimVector(from.strides()), from.scalar_type()};
    auto* const data = static_cast<char*>(const_cast<void*>(from.const_data_ptr()));
    const transfer::How& how = self.how[(bytes > self.below[0]) + (bytes > self.below[1])];
    int64_t wrong = 0;
    {
      const Unlocked unlocked;
      wrong = transfer::move(self.stager, self.up ? data : nullptr, self.up ? nullptr : data, bytes, self.up, how, stream, {&Result::made, &to});
    }
    if (to.problem) std::rethrow_exception(to.problem);
    if (wrong)
      return PyErr_Format(PyExc_RuntimeError, "to: CUDA reports error %lld for a transfer of %lld bytes", static_cast<long long>(wrong),
                          static_cast<long long>(bytes));
    return wrapped(std::move(to.tensor));
  } catch (...) {
    translated();
    return nullptr;
  }
}

void forget(PyObject* object) {
  Py_XDECREF(reinterpret_cast<PyObject*>(reinterpret_cast<Mover*>(object)->driver));
  Py_TYPE(object)->tp_free(object);
}

// Mover(driver, (index, up), stager, smallest, (least, most, unit, patience), below, rules)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *driver = nullptr, *given[3] = {};
  int index = 0, up = 0;
  long long stager = 0, smallest = 0;
  if (!PyArg_ParseTuple(args, "O!(ip)LLOOO", &DriverType, &driver, &index, &up, &stager, &smallest, &given[0], &given[1], &given[2]))
    return nullptr;
  std::vector<int64_t> shape, below, rules;
  if (!numbers(given[0], shape) || !numbers(given[1], below) || !numbers(given[2], rules)) return nullptr;
  if (shape.size() != 4 || below.size() != CLASSES - 1 || rules.size() != 2 * CLASSES)
    return PyErr_Format(PyExc_ValueError, "a mover has four numbers of a transfer, two sizes, and threads and stores for three classes");
  auto* self = reinterpret_cast<Mover*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->driver = reinterpret_cast<Driver*>(Py_NewRef(driver));
  self->index = index, self->up = up != 0, self->stager = stager, self->smallest = smallest;
  std::copy(below.begin(), below.end(), self->below);
  for (size_t i = 0; i < CLASSES; ++i) self->how[i] = {shape[0], shape[1], shape[2], rules[2 * i], shape[3], rules[2 * i + 1]};
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace

PyTypeObject MoverType = type("tensorlogic_calls.Mover", sizeof(Mover), offsetof(Mover, vectorcall), &make, &forget,
                              "Mover(driver, (index, up), stager, smallest, (least, most, unit, patience), below, rules): tensor -> the same "
                              "on the other side, or None where the call is none for it: not dense, small, pinned, watched, captured, or of "
                              "another device. `rules`: threads and stores for sizes up to the first of `below`, the second, and beyond");

}  // namespace tensorlogic::calls
