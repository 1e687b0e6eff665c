// Calls of operators without PyTorch's dispatcher, for those who have made sure that it would do
// nothing: the kernels by name, with their arguments as plain words.
#pragma once

#include <stdint.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "pool.h"

namespace tensorlogic {

union Argument {
  AtenTensorHandle tensor;  // borrowed; null where absent
  int64_t integer;          // of "i", "b" and "c"
  double real;
};

struct Direct {
  const char* kinds;  // one letter an argument: tensor, optional tensor, int, bool, double, code of a dtype
  int outputs;
  void (*call)(const Argument* in, AtenTensorHandle* out);  // throws std::exception; `out` belongs to the caller
};

// Null where there is no such operator.
TENSORLOGIC_EXPORT const Direct* direct(const char* name);

}  // namespace tensorlogic
