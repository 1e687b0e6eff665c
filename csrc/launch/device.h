// Starting compiled GPU kernels: the driver's entry points by address, so that nothing of CUDA is needed
// to build this module, nor to load it.
#pragma once

#include <ATen/core/TensorBase.h>

#include <optional>
#include <string>

#include "../calls/calls.h"

namespace tensorlogic::calls {

constexpr int WORDS = 64;  // the most arguments of a kernel
constexpr int MAPS = 6;    // and of matrices that bulk copies read or write
constexpr size_t MAP_BYTES = 128;

// The driver's structs of cuLaunchKernelEx (tests compare them with cuda.h).
struct Attribute {
  uint32_t id;
  uint32_t padding;
  uint32_t value[16];
};
struct Config {
  uint32_t grid[3], block[3], shared;
  void* stream;
  Attribute* attributes;
  uint32_t count;
};
constexpr uint32_t COOPERATIVE = 2, PROGRAMMATIC = 6;

// Where the functions lie that start kernels and allocate on one kind of device.
struct Driver {
  PyObject_HEAD
  int (*launch)(const Config*, void* function, void** arguments, void** extra);  // cuLaunchKernelEx
  int (*stream)(int32_t device, void** out);  // aoti_torch_get_current_cuda_stream
  int (*capturing)(void* stream, int* status);  // cuStreamIsCapturing
  // at::detail::empty_strided_cuda; null: tensors of the CPU, as tests want them.
  at::TensorBase (*empty)(at::IntArrayRef, at::IntArrayRef, at::ScalarType, std::optional<at::Device>);
  int (*copy)(uint64_t to, uint64_t from, size_t bytes, void* stream);  // cuMemcpyDtoDAsync, or null
  int (*graph)(void* executable, void* stream);                         // cuGraphLaunch, or null

  at::Device device(int index) const {
    return empty ? at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index)) : at::Device(at::kCPU);
  }
  at::Tensor made(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, int index) const;
};

// empty(shape, strides, dtype) -> a tensor of one device.
struct Empty {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Driver* driver;
  int index;
};

// start(*tensors, *numbers) -> whether the kernel was started.
struct Start {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* usual;  // the same in Python: for what is no plain tensor, and to say what the driver refuses
  Driver* driver;
  int index;
  bool several;  // devices: the current one may be another
  void* function;
  Config config;  // but the stream and the attributes' place
  Attribute attributes[2];
  uint64_t mask;     // of the bits that no pointer may have
  int64_t scratch;   // bytes
  std::string* layout;  // a letter an argument of the kernel: m, p, i, f, l (see `Start`'s doc)
  uint64_t* fixed;      // a word an argument: of those that are constant
  PyObject* maps;       // a tuple: for each m, address -> what the kernel is given as its tensor map
  int given;            // tensors and numbers of a call
};

// What a launcher does, noted while it is called with slots for tensors and numbers.
extern thread_local PyObject* tape;  // a list, or null
// Appends (callable, arguments, slot or None); null with an error.
PyObject* note(PyObject* callable, PyObject* const* given, size_t n, PyObject* slot);

// 1: started, 0: declined, -1: an error is set.
int start(const Start& self, PyObject* const* given);

// How a front serves a call by a plan.
enum How { WHOLE = 1, OUTSIDE = 2 };  // all outputs as a tuple; not while the stream is captured

// The first output of a plan, or all; null where the call needs another way; false with an error set.
bool served(PyObject* plan, PyObject* const* given, int how, PyObject** out);

// Whether the stream that a plan goes to is being captured, or may be.
bool captured(PyObject* plan);

// Whether the error that is set says so.
bool out_of_memory();

extern PyTypeObject DriverType, EmptyType, StartType, StepType, SeriesType, SlotType, PlanType,
    RecordingType, CountedType, GuardedType, WayType, StillType, UnchangedType, MoverType;

}  // namespace tensorlogic::calls
