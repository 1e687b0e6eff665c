// The short way to a CUDA graph: what it holds.
#pragma once

#include "device.h"
#include "../calls/tensor_guard.h"

namespace tensorlogic::calls {

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
  Ref driver, tape, line, acquire, release, turn, variable, policy, force, compiler, level, forward, shape, before, after, miss,
      usual;
  int index = 0;
  bool several = false;  // devices: the current one may be another
  bool grad = false;
  Switches switches = Switches::now();
  void* graph = nullptr;  // null: the tape is asked to replay
  bool leaf = false;      // the one output is all that is handed out
  std::vector<Input> inputs;
  std::vector<Output> outputs;

  const Driver& on() const { return *reinterpret_cast<Driver*>(driver.get()); }
  template <typename Use>
  int each(Use use) {
    for (Ref* ref : {&driver, &tape, &line, &acquire, &release, &turn, &variable, &policy, &force, &compiler, &level, &forward,
                     &shape, &before, &after, &miss, &usual})
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

// A call of a way.
PyObject* ways_call(PyObject* way, PyObject* const* given, size_t flags, PyObject* names);

}  // namespace tensorlogic::calls
