// Products of cuBLASLt, one after another onto the same result, as one Python object.
#include "device.h"

#include <c10/core/DeviceGuard.h>

#include <vector>

namespace tensorlogic::calls {
namespace {

// cublasLtMatmul
using Matmul = int (*)(void* handle, void* product, const void* alpha, const void* a, void* a_layout,
                       const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                       void* d, void* d_layout, const void* algorithm, void* workspace, size_t size,
                       void* stream);

// w stands on the left: the library's matrices are column-major.
struct Part {
  void* product;
  const void* alpha;
  int64_t w;  // bytes to where this part begins
  void* w_layout;
  int64_t x;
  void* x_layout;
  const void* beta;
  void *c, *d;
  const void* algorithm;
};

struct Series {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Matmul matmul;
  void* handle;
  Driver* driver;
  int index;
  bool several;  // devices: the current one may be another
  std::vector<Part>* parts;
  PyObject* kept;  // what the addresses belong to
};

// The first status that is not 0.
int multiplied(const Series& self, PyObject* const* given, size_t n) {
  const auto x = static_cast<char*>(tensor_of(given[0]).data_ptr());
  const auto w = static_cast<char*>(tensor_of(given[1]).data_ptr());
  void* y = tensor_of(given[2]).data_ptr();
  void* space = n > 3 ? tensor_of(given[3]).data_ptr() : nullptr;
  const size_t size = n > 3 ? tensor_of(given[3]).nbytes() : 0;
  void* stream = nullptr;
  if (const int status = self.driver->stream(self.index, &stream)) return status;
  for (const Part& p : *self.parts)
    if (const int status = self.matmul(self.handle, p.product, p.alpha, w + p.w, p.w_layout, x + p.x,
                                       p.x_layout, p.beta, y, p.c, y, p.d, p.algorithm, space, size, stream))
      return status;
  return 0;
}

PyObject* called(PyObject* object, PyObject* const* given, size_t flags, PyObject* names) {
  auto& self = *reinterpret_cast<Series*>(object);
  const Py_ssize_t n = PyVectorcall_NARGS(flags);
  if (names || n < 3 || n > 4)
    return PyErr_Format(PyExc_TypeError, "a series takes x, w, y and a workspace, not %zd tensors", n);
  if (tape) return note(object, given, static_cast<size_t>(n), Py_True);
  for (Py_ssize_t i = 0; i < n; ++i)
    if (!any_tensor(given[i]))
      return PyErr_Format(PyExc_TypeError, "a series takes tensors, not %R", given[i]);
  try {
    std::optional<c10::DeviceGuard> there;
    if (self.several) there.emplace(self.driver->device(self.index));
    if (const int status = multiplied(self, given, static_cast<size_t>(n)))
      return PyErr_Format(PyExc_RuntimeError, "cublasLtMatmul failed with status %d", status);
  } catch (...) {
    translated();
    return nullptr;
  }
  Py_RETURN_TRUE;
}

// A tuple of a Part's ten numbers.
bool read(PyObject* numbers_of_part, Part& out) {
  std::vector<int64_t> n;
  if (!numbers(numbers_of_part, n)) return false;
  if (n.size() != 10) {
    PyErr_SetString(PyExc_ValueError, "a part of a series is ten numbers");
    return false;
  }
  const auto at = [&](size_t i) { return reinterpret_cast<void*>(n[i]); };
  out = {at(0), at(1), n[2], at(3), n[4], at(5), at(6), at(7), at(8), at(9)};
  return true;
}

void forget(PyObject* object) {
  auto* self = reinterpret_cast<Series*>(object);
  Py_XDECREF(reinterpret_cast<PyObject*>(self->driver));
  Py_XDECREF(self->kept);
  delete self->parts;
  Py_TYPE(object)->tp_free(object);
}

// Series(driver, (index, several), matmul, handle, parts, kept)
PyObject* make(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject *driver = nullptr, *parts = nullptr, *kept = nullptr;
  int index = 0, several = 0;
  unsigned long long matmul = 0, handle = 0;
  if (!PyArg_ParseTuple(args, "O!(ip)KKO!O", &DriverType, &driver, &index, &several, &matmul, &handle,
                        &PyTuple_Type, &parts, &kept))
    return nullptr;
  auto* self = reinterpret_cast<Series*>(type->tp_alloc(type, 0));
  if (!self) return nullptr;
  self->vectorcall = &called;
  self->driver = reinterpret_cast<Driver*>(Py_NewRef(driver));
  self->kept = Py_NewRef(kept);
  self->index = index;
  self->several = several != 0;
  self->matmul = reinterpret_cast<Matmul>(matmul);
  self->handle = reinterpret_cast<void*>(handle);
  self->parts = new std::vector<Part>;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); ++i) {
    Part part{};
    if (!read(PyTuple_GET_ITEM(parts, i), part)) {
      Py_DECREF(self);
      return nullptr;
    }
    self->parts->push_back(part);
  }
  return reinterpret_cast<PyObject*>(self);
}

}  // namespace

PyTypeObject SeriesType =
    type("tensorlogic_calls.Series", sizeof(Series), offsetof(Series, vectorcall), &make, &forget,
         "Series(driver, (index, several), matmul, handle, parts, kept): (x, w, y, workspace) -> True. A part "
         "is (product, alpha, bytes into w, its layout, bytes into x, its layout, beta, layouts of c and d, "
         "algorithm); `kept` owns them");

}  // namespace tensorlogic::calls
