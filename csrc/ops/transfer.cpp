// Ordinary memory to and from a GPU through a ring of pinned buffers: a crew of threads copies units of a chunk between memory and
// its buffer, all of them at one chunk, so that the first one is soon there and the last one soon done, while the copy engine moves
// the chunks before it (or behind it). CUDA's functions come as addresses from the caller, so that this library is linked to none of it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>

#include "../crew.h"
#include "isa.h"
#include "op.h"

namespace tensorlogic::ops {
namespace {

using Numbers = std::vector<int64_t>;

template <class F>
F function_at(int64_t address) {
  static_assert(sizeof(F) == sizeof(address));
  F f;
  memcpy(&f, &address, sizeof f);
  return f;
}

// A buffer, and how far the chunks that pass through it are, by their numbers and one.
struct Slot {
  std::atomic<int64_t> left{0};    // units of the chunk in it that are not copied yet
  std::atomic<int64_t> ready{0};   // the chunk for which it may be written to (up) or read (down)
  std::atomic<int64_t> issued{0};  // the chunk that was given to the copy engine
};

struct Transfer {
  char *host, *device, *pinned;
  int64_t bytes, chunk, unit, stride, slots;
  bool up, past_caches;
  int ordinal;
  void* stream;
  const Numbers& events;
  // cudaSetDevice, cudaMemcpyAsync, cudaEventRecord, cudaEventSynchronize
  int (*use)(int);
  int (*move)(void*, const void*, size_t, int, void*);
  int (*record)(void*, void*);
  int (*wait)(void*);
  std::unique_ptr<Slot[]> state = std::make_unique<Slot[]>(static_cast<size_t>(slots));
  const int64_t chunks = (bytes + chunk - 1) / chunk, share = (chunk + unit - 1) / unit;
  std::atomic<int64_t> next{0};
  std::atomic<int> problem{0};

  bool good(int status) {
    if (status) problem.store(status);
    return status == 0;
  }
  Slot& slot(int64_t c) const { return state[static_cast<size_t>(c % slots)]; }
  char* buffer(int64_t c) const { return pinned + c % slots * stride; }
  void* event(int64_t c) const { return reinterpret_cast<void*>(events[static_cast<size_t>(c % slots)]); }
  int64_t size(int64_t c) const { return std::min(chunk, bytes - c * chunk); }
  int64_t units(int64_t c) const { return (size(c) + unit - 1) / unit; }

  void copy(char* to, const char* from, int64_t n) const {
    const int64_t floats = past_caches ? n / 4 : 0;
    if (floats) kernels().convert(DType::f32, DType::f32, from, to, floats, true);
    memcpy(to + 4 * floats, from + 4 * floats, static_cast<size_t>(n - 4 * floats));
  }
  bool until(const std::atomic<int64_t>& value, int64_t least) const {
    for (int64_t turn = 0; value.load() < least; ++turn) {
      if (problem.load()) return false;
      crew::pause(turn);
    }
    return true;
  }
  bool issue(int64_t c) {
    constexpr int TO_DEVICE = 1, TO_HOST = 2;
    char* const there = device + c * chunk;
    const auto n = static_cast<size_t>(size(c));
    if (!good(up ? move(there, buffer(c), n, TO_DEVICE, stream) : move(buffer(c), there, n, TO_HOST, stream))) return false;
    if (!good(record(event(c), stream))) return false;
    slot(c).issued = c + 1;
    return true;
  }
  // By whoever takes a chunk's first unit: until its buffer was emptied (up) or filled (down).
  bool open(int64_t c) {
    Slot& s = slot(c);
    const int64_t before = up ? c - slots : c;  // the chunk that must have passed the engine
    if (before >= 0 && !until(s.issued, before + 1)) return false;
    if (!good(wait(event(c)))) return false;
    s.left = units(c);
    s.ready = c + 1;
    return true;
  }
  bool close(int64_t c) {
    const int64_t then = up ? c : c + slots;
    return then >= chunks || issue(then);
  }
  void work() {
    if (!good(use(ordinal))) return;
    while (!problem.load()) {
      const int64_t u = next.fetch_add(1), c = u / share, first = u % share * unit;
      if (c >= chunks) return;
      if (first >= size(c)) continue;
      if (first == 0 ? !open(c) : !until(slot(c).ready, c + 1)) return;
      const int64_t n = std::min(unit, size(c) - first);
      char *const mine = host + c * chunk + first, *const pin = buffer(c) + first;
      copy(up ? pin : mine, up ? mine : pin, n);
      if (slot(c).left.fetch_sub(1) == 1 && !close(c)) return;
    }
  }
  void operator()() { work(); }
};

// host: bytes; pinned: bytes, as many buffers as there are events; calls: the four functions of Transfer.
void staged_copy(const Input& host, const Input& pinned, Numbers events, Numbers calls, int64_t device,
                 int64_t chunk, int64_t unit, int64_t workers, bool up, bool past_caches, int64_t ordinal, int64_t stream) {
  host.check("staged_copy", "host", aoti_torch_dtype_uint8());
  pinned.check("staged_copy", "pinned", aoti_torch_dtype_uint8());
  const auto slots = static_cast<int64_t>(events.size());
  if (workers < 1 || unit < 1 || chunk < 1 || slots < 1 || pinned.numel < slots * chunk || calls.size() != 4)
    fail("staged_copy: a chunk of pinned memory for every event, and four functions are required");
  if (host.numel == 0) return;
  Transfer t{static_cast<char*>(host.data), reinterpret_cast<char*>(device), static_cast<char*>(pinned.data),
             host.numel, chunk, unit, pinned.numel / slots, slots, up, past_caches, static_cast<int>(ordinal),
             reinterpret_cast<void*>(stream), events,
             function_at<int (*)(int)>(calls[0]),
             function_at<int (*)(void*, const void*, size_t, int, void*)>(calls[1]),
             function_at<int (*)(void*, void*)>(calls[2]), function_at<int (*)(void*)>(calls[3])};
  if (!up && t.good(t.use(t.ordinal)))
    for (int64_t c = 0; c < std::min(slots, t.chunks) && t.issue(c);) ++c;
  crew::run(std::min(workers, t.chunks * t.share) - 1, t);
  if (t.problem.load()) fail("staged_copy: CUDA reports error " + std::to_string(t.problem.load()));
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def(
      "staged_copy(Tensor host, Tensor pinned, int[] events, int[] calls, int device, int chunk, int unit, int workers, "
      "bool up, bool past_caches, int ordinal, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  m.impl("staged_copy", BOXED(tensorlogic::ops::staged_copy));
}
