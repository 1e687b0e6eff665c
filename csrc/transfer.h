// Transfers of ordinary memory to and from a device, for those who call them past PyTorch's dispatcher (csrc/ops/transfer.cpp).
#pragma once

#include <stdint.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "pool.h"

namespace tensorlogic::transfer {

constexpr int64_t MISUSED = -1, NOT_MADE = -2;  // besides CUDA's own numbers

// How bytes are moved: chunks have `least` to `most` of them, but where less is left; `workers` threads, of which the caller copies only
// after `patience` microseconds without anything to call, copy `unit` at a time; `stores` is one of Stores in transfer.cpp.
struct How {
  int64_t least, most, unit, workers, patience, stores;
};

// Where to, made while the transfer has begun: `device` of one to it, `host` of one from it.
struct Made {
  char* (*make)(void* context) = nullptr;  // must not throw; null: there is no memory, so the transfer ends
  void* context = nullptr;
};

// `bytes` between addresses on the host and on the device, in the order of a stream; a stager's transfers wait for each other.
// Returns 0, or what is wrong.
TENSORLOGIC_EXPORT int64_t move(int64_t stager, char* host, char* device, int64_t bytes, bool up, const How& how, void* stream, Made made = {});

// A contiguous tensor of the pool for one that comes from a device; throws std::exception.
TENSORLOGIC_EXPORT AtenTensorHandle memory(int32_t dtype, const int64_t* sizes, int64_t dim);

}  // namespace tensorlogic::transfer
