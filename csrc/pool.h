// Memory for CPU outputs: freed blocks are kept by size class and given out again, so that large
// outputs cost no page faults.
#pragma once

#include <stdint.h>

#include <vector>

#define TENSORLOGIC_EXPORT __attribute__((visibility("default")))  // for the hooks library

namespace tensorlogic::pool {

constexpr int64_t SMALLEST = 64 << 10;  // below, PyTorch's own allocator is as fast

struct Block {
  void* data;
  void* ticket;  // belongs with data; both go back to `release`
  bool zeroed;   // fresh from the system, so already zero
};

// At least `bytes` (>= SMALLEST), aligned to 64; data is null where the pool is disabled or the
// system has no more.
TENSORLOGIC_EXPORT Block allocate(int64_t bytes);
TENSORLOGIC_EXPORT void release(void* data, void* ticket);

// allocations, reuses, bytes_in_use, bytes_requested, bytes_held, high_water_bytes, max_bytes,
// max_buffers_per_size
std::vector<int64_t> stats();
// Five numbers a size class that was ever used: size, in_use, held, allocations, reuses
std::vector<int64_t> classes();

void configure(int64_t max_bytes, int64_t max_buffers_per_size);  // negative: unchanged
int64_t shrink(int64_t max_bytes);                                // returns the bytes given back
void reset_counters();
void disable(int64_t change);  // +1 and -1 nest

}  // namespace tensorlogic::pool
