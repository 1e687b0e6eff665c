// What PyTorch's stable ABI does not reach: a small library built per version of PyTorch, optional.
#pragma once

#include <torch/library.h>

#include <optional>
#include <string>

namespace tensorlogic::hooks {

void pool_all(bool on);  // every CPU tensor of pool::SMALLEST bytes and more comes from the pool
bool pools_all();

// Repairs and measurements on this thread see PyTorch's own kernels.
bool is_suspended();
void suspend(int64_t change);
struct Suspend {
  Suspend() { suspend(1); }
  ~Suspend() { suspend(-1); }
  Suspend(const Suspend&) = delete;
  Suspend& operator=(const Suspend&) = delete;
};

// A guard of its own for an operator whose arguments are dear to box.
std::optional<torch::CppFunction> typed_guard(const std::string& name);

}  // namespace tensorlogic::hooks
