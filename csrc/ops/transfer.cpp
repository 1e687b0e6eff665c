// Ordinary memory to and from a GPU through a ring of pinned buffers: a crew of threads copies units of a chunk between memory and
// its buffer, all of them at one chunk, so that the first one is soon there and the last one soon done, while the copy engine moves
// the chunks before it (or behind it). CUDA's functions come as addresses from the caller, so that this library is linked to none of it.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>

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

// The pinned buffers of a device and direction, an event for each, and CUDA's functions.
struct Stager {
  char* pinned;
  int64_t stride;
  Numbers events;
  int ordinal;
  int (*use)(int);
  int (*move)(void*, const void*, size_t, int, void*);
  int (*record)(void*, void*);
  int (*wait)(void*);
};
std::mutex stagers_mutex;
std::deque<Stager>& stagers() {  // which stay where they are
  static auto* const kept = new std::deque<Stager>;
  return *kept;
}

// A buffer, and how far the chunks that pass through it are, by their numbers and one.
struct Slot {
  std::atomic<int64_t> left{0};    // units of the chunk in it that are not copied yet
  std::atomic<int64_t> ready{0};   // the chunk for which it may be written to (up) or read (down)
  std::atomic<int64_t> issued{0};  // the chunk that was given to the copy engine
};

struct Transfer {
  const Stager& by;
  char *host, *device;
  int64_t bytes, chunk, unit;
  bool up, past_caches;
  void* stream;
  const int64_t slots = static_cast<int64_t>(by.events.size());
  const std::vector<int64_t> begins = cut();  // of every chunk, and where the last one ends
  const int64_t chunks = static_cast<int64_t>(begins.size()) - 1, share = (chunk + unit - 1) / unit;
  std::unique_ptr<Slot[]> state = std::make_unique<Slot[]>(static_cast<size_t>(slots));
  std::atomic<int64_t> next{0};
  std::atomic<int> problem{0};

  // Chunks as large as asked, for the engine's calls cost more than their bytes where they are small; but the engine waits for the
  // first one to be copied, and the caller for the last one: those are a quarter and a half of that.
  std::vector<int64_t> cut() const {
    std::vector<int64_t> sizes;
    int64_t left = bytes;
    for (const int64_t part : {4, 2})
      if (left > 0 && chunk % part == 0) sizes.push_back(std::min(left, chunk / part)), left -= sizes.back();
    for (; left > 0; left -= sizes.back()) sizes.push_back(std::min(left, chunk));
    if (!up) std::reverse(sizes.begin(), sizes.end());
    std::vector<int64_t> found{0};
    for (const int64_t n : sizes) found.push_back(found.back() + n);
    return found;
  }

  bool good(int status) {
    if (status) problem.store(status);
    return status == 0;
  }
  Slot& slot(int64_t c) const { return state[static_cast<size_t>(c % slots)]; }
  char* buffer(int64_t c) const { return by.pinned + c % slots * by.stride; }
  void* event(int64_t c) const { return reinterpret_cast<void*>(by.events[static_cast<size_t>(c % slots)]); }
  int64_t begin(int64_t c) const { return begins[static_cast<size_t>(c)]; }
  int64_t size(int64_t c) const { return begin(c + 1) - begin(c); }
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
    char* const there = device + begin(c);
    const auto n = static_cast<size_t>(size(c));
    if (!good(up ? by.move(there, buffer(c), n, TO_DEVICE, stream) : by.move(buffer(c), there, n, TO_HOST, stream))) return false;
    if (!good(by.record(event(c), stream))) return false;
    slot(c).issued = c + 1;
    return true;
  }
  // By whoever takes a chunk's first unit: until its buffer was emptied (up) or filled (down).
  bool open(int64_t c) {
    Slot& s = slot(c);
    const int64_t before = up ? c - slots : c;  // the chunk that must have passed the engine
    if (before >= 0 && !until(s.issued, before + 1)) return false;
    if (!good(by.wait(event(c)))) return false;
    s.left = units(c);
    s.ready = c + 1;
    return true;
  }
  bool close(int64_t c) {
    const int64_t then = up ? c : c + slots;
    return then >= chunks || issue(then);
  }
  void work() {
    if (!good(by.use(by.ordinal))) return;
    while (!problem.load()) {
      const int64_t u = next.fetch_add(1), c = u / share, first = u % share * unit;
      if (c >= chunks) return;
      if (first >= size(c)) continue;
      if (first == 0 ? !open(c) : !until(slot(c).ready, c + 1)) return;
      const int64_t n = std::min(unit, size(c) - first);
      char *const mine = host + begin(c) + first, *const pin = buffer(c) + first;
      copy(up ? pin : mine, up ? mine : pin, n);
      if (slot(c).left.fetch_sub(1) == 1 && !close(c)) return;
    }
  }
  void operator()() { work(); }
};

// pinned: bytes, a buffer for every event; calls: cudaSetDevice, cudaMemcpyAsync, cudaEventRecord, cudaEventSynchronize. Returns its
// number, by which `staged_copy` knows it; it is kept, and so must be what it was given.
int64_t staging_open(const Input& pinned, Numbers events, Numbers calls, int64_t ordinal) {
  pinned.check("staging_open", "pinned", aoti_torch_dtype_uint8());
  const auto slots = static_cast<int64_t>(events.size());
  if (slots < 1 || pinned.numel < slots || calls.size() != 4)
    fail("staging_open: pinned memory for every event, and four functions are required");
  const std::lock_guard<std::mutex> lock(stagers_mutex);
  stagers().push_back({static_cast<char*>(pinned.data), pinned.numel / slots, std::move(events), static_cast<int>(ordinal),
                       function_at<int (*)(int)>(calls[0]),
                       function_at<int (*)(void*, const void*, size_t, int, void*)>(calls[1]),
                       function_at<int (*)(void*, void*)>(calls[2]), function_at<int (*)(void*)>(calls[3])});
  return static_cast<int64_t>(stagers().size()) - 1;
}

// `bytes` between addresses on the host and on the device, in the order of a stream; one call at a time for every stager.
void staged_copy(int64_t stager, int64_t host, int64_t device, int64_t bytes, int64_t chunk, int64_t unit, int64_t workers,
                 bool up, bool past_caches, int64_t stream) {
  const Stager* by = nullptr;
  {
    const std::lock_guard<std::mutex> lock(stagers_mutex);
    if (stager >= 0 && stager < static_cast<int64_t>(stagers().size())) by = &stagers()[static_cast<size_t>(stager)];
  }
  if (!by || workers < 1 || unit < 1 || chunk < 1 || chunk > by->stride)
    fail("staged_copy: an open stager, threads, units, and chunks that its buffers hold are required");
  if (bytes < 1) return;
  Transfer t{*by, reinterpret_cast<char*>(host), reinterpret_cast<char*>(device), bytes, chunk, unit, up, past_caches,
             reinterpret_cast<void*>(stream)};
  if (!up && t.good(by->use(by->ordinal)))
    for (int64_t c = 0; c < std::min(t.slots, t.chunks) && t.issue(c);) ++c;
  crew::run(std::min(workers, t.chunks * t.share) - 1, t);
  if (t.problem.load()) fail("staged_copy: CUDA reports error " + std::to_string(t.problem.load()));
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("staging_open(Tensor pinned, int[] events, int[] calls, int ordinal) -> int");
  m.def(
      "staged_copy(int stager, int host, int device, int bytes, int chunk, int unit, int workers, bool up, "
      "bool past_caches, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CompositeExplicitAutograd, m) {
  m.impl("staging_open", BOXED(tensorlogic::ops::staging_open));
  m.impl("staged_copy", BOXED(tensorlogic::ops::staged_copy));
}
