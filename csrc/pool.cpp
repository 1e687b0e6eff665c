#include "pool.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(data, size) ((void)(data), (void)(size))
#define ASAN_UNPOISON_MEMORY_REGION(data, size) ((void)(data), (void)(size))
#endif

namespace tensorlogic::pool {
namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;
constexpr int FIRST_BIT = 16;  // log2(SMALLEST)
constexpr int CLASSES =
    (47 - FIRST_BIT) * 4;  // four a power of two: at most a quarter of a block is unused

int class_of(int64_t bytes) {
  int bit = 63 - __builtin_clzll(static_cast<unsigned long long>(bytes - 1));
  if (bytes <= SMALLEST) return 0;
  int64_t quarter = (bytes - 1 - (int64_t{1} << bit)) >> (bit - 2);
  return (bit - FIRST_BIT) * 4 + static_cast<int>(quarter) + 1;
}

int64_t size_of(int index) {
  int64_t base = SMALLEST << (index / 4);
  return base + base / 4 * (index % 4);
}

void* map(int64_t size) {
  size_t whole = static_cast<size_t>(size >= HUGE_PAGE ? size + HUGE_PAGE : size);
  void* p = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) return nullptr;
  if (size < HUGE_PAGE) return p;
  char* start = static_cast<char*>(p);
  size_t before = static_cast<size_t>(-reinterpret_cast<intptr_t>(start) & (HUGE_PAGE - 1));
  size_t after = whole - before - static_cast<size_t>(size);
  if (before) munmap(start, before);
  if (after) munmap(start + before + size, after);
#if defined(MADV_HUGEPAGE)
  madvise(start + before, static_cast<size_t>(size), MADV_HUGEPAGE);
#endif
  return start + before;
}

void unmap(void* data, int64_t size) {
  ASAN_UNPOISON_MEMORY_REGION(data, static_cast<size_t>(size));
  munmap(data, static_cast<size_t>(size));
}

// What this process may use: the machine's memory, or its control group's limit where that is less.
int64_t memory_limit() {
  int64_t limit = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  for (const char* path :
       {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"}) {
    if (FILE* f = fopen(path, "r")) {
      long long value = 0;
      if (fscanf(f, "%lld", &value) == 1 && value > 0)
        limit = std::min(limit, static_cast<int64_t>(value));
      fclose(f);
    }
  }
  return limit;
}

struct Free {
  void* data;
  int64_t freed_at;  // by the clock of releases
};

struct Class {
  std::vector<Free> free;  // most recently used last: it is the warmest
  int64_t in_use = 0, allocations = 0, reuses = 0;
};

struct Pool {
  std::mutex mutex;
  Class classes[CLASSES];
  int64_t clock = 0, disabled = 0;
  int64_t in_use = 0, requested = 0, held = 0, high_water = 0, allocations = 0, reuses = 0;
  int64_t max_bytes = memory_limit() / 8, max_buffers = 32;

  void drop_oldest_of(int index) {
    Class& c = classes[index];
    unmap(c.free.front().data, size_of(index));
    c.free.erase(c.free.begin());
    held -= size_of(index);
  }

  void trim(int64_t limit) {
    while (held > limit) {
      int oldest = -1;
      for (int i = 0; i < CLASSES; ++i)
        if (!classes[i].free.empty() && (oldest < 0 || classes[i].free.front().freed_at <
                                                           classes[oldest].free.front().freed_at))
          oldest = i;
      drop_oldest_of(oldest);
    }
  }
};

// Never destroyed: tensors may be freed after every destructor has run.
Pool& pool() {
  static Pool& instance = *[] {
    Pool* p = new Pool;
    pthread_atfork([] { pool().mutex.lock(); }, [] { pool().mutex.unlock(); },
                   [] { pool().mutex.unlock(); });
    atexit([] { configure(0, 0); });
    return p;
  }();
  return instance;
}

// Class and requested bytes in the pointer that the tensor keeps: no header, no look-up.
void* ticket_of(int index, int64_t bytes) { return reinterpret_cast<void*>((bytes << 8) | index); }

}  // namespace

Block allocate(int64_t bytes) {
  Pool& p = pool();
  const int index = class_of(bytes);
  if (index >= CLASSES) return {nullptr, nullptr, false};
  const int64_t size = size_of(index);
  Block block{nullptr, ticket_of(index, bytes), false};
  std::unique_lock<std::mutex> lock(p.mutex);
  if (p.disabled) return block;
  Class& c = p.classes[index];
  if (!c.free.empty()) {
    block.data = c.free.back().data;
    c.free.pop_back();
    p.held -= size;
    ++p.reuses;
    ++c.reuses;
  } else {
    lock.unlock();
    block.data = map(size);
    lock.lock();
    if (!block.data) {  // the system may have room once the free blocks are gone
      p.trim(0);
      block.data = map(size);
    }
    if (!block.data) return block;
    block.zeroed = true;
  }
  ++p.allocations;
  ++c.allocations;
  ++c.in_use;
  p.in_use += size;
  p.requested += bytes;
  p.high_water = std::max(p.high_water, p.in_use + p.held);
  ASAN_UNPOISON_MEMORY_REGION(block.data, static_cast<size_t>(bytes));
  return block;
}

void release(void* data, void* ticket) {
  Pool& p = pool();
  const int64_t packed = reinterpret_cast<int64_t>(ticket);
  const int index = static_cast<int>(packed & 0xff);
  const int64_t size = size_of(index);
  std::unique_lock<std::mutex> lock(p.mutex);
  Class& c = p.classes[index];
  --c.in_use;
  p.in_use -= size;
  p.requested -= packed >> 8;
  if (p.disabled || size > p.max_bytes || p.max_buffers == 0) {
    lock.unlock();
    unmap(data, size);
    return;
  }
  if (static_cast<int64_t>(c.free.size()) >= p.max_buffers) p.drop_oldest_of(index);
  p.trim(p.max_bytes - size);
  ASAN_POISON_MEMORY_REGION(data, static_cast<size_t>(size));
  c.free.push_back({data, ++p.clock});
  p.held += size;
}

std::vector<int64_t> stats() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  return {p.allocations, p.reuses,     p.in_use,    p.requested,
          p.held,        p.high_water, p.max_bytes, p.max_buffers};
}

std::vector<int64_t> classes() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  std::vector<int64_t> rows;
  for (int i = 0; i < CLASSES; ++i) {
    const Class& c = p.classes[i];
    if (!c.allocations && !c.in_use && c.free.empty()) continue;
    rows.insert(rows.end(), {size_of(i), c.in_use, static_cast<int64_t>(c.free.size()),
                             c.allocations, c.reuses});
  }
  return rows;
}

void configure(int64_t max_bytes, int64_t max_buffers_per_size) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  if (max_bytes >= 0) p.max_bytes = max_bytes;
  if (max_buffers_per_size >= 0) p.max_buffers = max_buffers_per_size;
  for (int i = 0; i < CLASSES; ++i)
    while (static_cast<int64_t>(p.classes[i].free.size()) > p.max_buffers) p.drop_oldest_of(i);
  p.trim(p.max_bytes);
}

int64_t shrink(int64_t max_bytes) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  const int64_t before = p.held;
  p.trim(std::max<int64_t>(max_bytes, 0));
  return before - p.held;
}

void reset_counters() {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.allocations = p.reuses = 0;
  p.high_water = p.in_use + p.held;
  for (Class& c : p.classes) c.allocations = c.reuses = 0;
}

void disable(int64_t change) {
  Pool& p = pool();
  std::lock_guard<std::mutex> lock(p.mutex);
  p.disabled = std::max<int64_t>(p.disabled + change, 0);
}

}  // namespace tensorlogic::pool
