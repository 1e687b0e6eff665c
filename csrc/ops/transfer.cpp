// Ordinary memory to and from a GPU through a ring of pinned buffers: a crew of threads copies units of a chunk between memory and
// its buffer, all of them at one chunk, while the copy engine moves the chunks before it (or behind it). The caller alone calls CUDA,
// and leaves copying to its crew: it keeps its caches for what it does next. CUDA's functions come as addresses, so that this library
// is linked to none of it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "../crew.h"
#include "isa.h"
#include "op.h"

namespace tensorlogic::ops {
namespace {

using Numbers = std::vector<int64_t>;
using Clock = std::chrono::steady_clock;

template <class F>
F function_at(int64_t address) {
  static_assert(sizeof(F) == sizeof(address));
  F f;
  memcpy(&f, &address, sizeof f);
  return f;
}
void* handle(int64_t number) { return reinterpret_cast<void*>(number); }

// The pinned buffers of a device and direction, an event for each and one more, and CUDA's functions.
struct Stager {
  char* pinned;
  int64_t stride;
  Numbers events;
  int ordinal;
  int (*use)(int);
  int (*move)(void*, const void*, size_t, int, void*);
  int (*record)(void*, void*);
  int (*query)(void*);
  int64_t cursor = 0, left = 0;  // the next buffer, and how many before it an engine may still read from
  int64_t slots() const { return static_cast<int64_t>(events.size()) - 1; }
  void* event(int64_t i) const { return handle(events[static_cast<size_t>(i)]); }
  void* last() const { return event(slots()); }
};
std::mutex stagers_mutex;
std::deque<Stager>& stagers() {  // which stay where they are
  static auto* const kept = new std::deque<Stager>;
  return *kept;
}

// A buffer, and how far the chunks that pass through it are, by their numbers and one.
struct Slot {
  std::atomic<int64_t> left{0};   // units of the chunk in it that are not copied yet
  std::atomic<int64_t> ready{0};  // the chunk for which it may be written to (up) or read (down)
};

// Chunks that double to the largest: one end waits for the first copy, or for the last one, and every chunk costs the engine 3 us.
Numbers cut(int64_t bytes, int64_t least, int64_t most, bool rising) {
  Numbers sizes;
  int64_t left = bytes;
  for (int64_t size = least; size < most && left > 2 * size; size *= 2) sizes.push_back(size), left -= size;
  const int64_t count = (left + most - 1) / most, page = 4096;
  const int64_t size = std::min(most, ((left + count - 1) / count + page - 1) / page * page);
  for (; left > 0; left -= sizes.back()) sizes.push_back(std::min(size, left));
  if (!rising) std::reverse(sizes.begin(), sizes.end());
  Numbers found{0};
  for (const int64_t n : sizes) found.push_back(found.back() + n);
  return found;
}

struct Transfer {
  Stager& by;
  char *host, *device;
  int64_t most, unit;
  bool up, past_caches;
  void* stream;
  std::chrono::microseconds patience;  // of the caller, before it copies, too
  const Numbers begins;                // of every chunk, and where the last one ends
  const std::thread::id caller = std::this_thread::get_id();
  const int64_t slots = by.slots(), chunks = static_cast<int64_t>(begins.size()) - 1, share = (most + unit - 1) / unit;
  std::unique_ptr<Slot[]> state = std::make_unique<Slot[]>(static_cast<size_t>(slots));
  std::atomic<int64_t> next{0};
  std::atomic<bool> stopped{false};
  std::atomic<int64_t> came{0};  // of the crew
  int problem = 0;
  const int64_t first = by.cursor;

  bool good(int status) {
    if (status) problem = status, stopped = true;
    return status == 0;
  }
  Slot& slot(int64_t c) const { return state[static_cast<size_t>(c % slots)]; }
  int64_t place(int64_t c) const { return (first + c) % slots; }
  char* buffer(int64_t c) const { return by.pinned + place(c) * by.stride; }
  void* event(int64_t c) const { return by.event(place(c)); }
  // The chunk whose event tells that this one has passed the engine: on the way up few have one, for they cost the engine time.
  int64_t marked(int64_t c) const { return up ? std::min(c | 3, chunks - 1) : c; }
  int64_t begin(int64_t c) const { return begins[static_cast<size_t>(c)]; }
  int64_t size(int64_t c) const { return begin(c + 1) - begin(c); }

  void copy(char* to, const char* from, int64_t n) const {
    const int64_t floats = past_caches ? n / 4 : 0;
    if (floats) kernels().convert(DType::f32, DType::f32, from, to, floats, true);
    memcpy(to + 4 * floats, from + 4 * floats, static_cast<size_t>(n - 4 * floats));
  }
  void copy_unit(int64_t c, int64_t first) {
    const int64_t n = std::min(unit, size(c) - first);
    if (n > 0) {
      char *const mine = host + begin(c) + first, *const pin = buffer(c) + first;
      copy(up ? pin : mine, up ? mine : pin, n);
    }
    slot(c).left.fetch_sub(1);
  }
  // One of the crew: units in their order, each when its chunk's buffer is ready.
  void help() {
    ++came;
    for (;;) {
      const int64_t u = next.fetch_add(1), c = u / share;
      if (c >= chunks) return;
      for (int64_t turn = 0; slot(c).ready.load() <= c; ++turn) {
        if (stopped) return;
        crew::pause(turn);
      }
      copy_unit(c, u % share * unit);
    }
  }
  // The caller: one unit, where there is one that need not be waited for.
  bool help_once() {
    int64_t u = next.load();
    const int64_t c = u / share;
    if (c >= chunks || slot(c).ready.load() <= c) return false;
    if (next.compare_exchange_strong(u, u + 1)) copy_unit(c, u % share * unit);
    return true;
  }
  bool ready(int64_t c) {
    slot(c).left = share;
    slot(c).ready = c + 1;
    return true;
  }
  bool copied(int64_t c) const { return slot(c).left.load() == 0; }  // of a chunk that was made ready
  bool passed(void* event) {
    constexpr int NOT_READY = 600;
    const int status = by.query(event);
    return status != NOT_READY && good(status);
  }

  bool issue(int64_t c) {
    constexpr int TO_DEVICE = 1, TO_HOST = 2;
    char* const there = device + begin(c);
    const auto n = static_cast<size_t>(size(c));
    if (!good(up ? by.move(there, buffer(c), n, TO_DEVICE, stream) : by.move(buffer(c), there, n, TO_HOST, stream))) return false;
    return marked(c) != c || good(by.record(event(c), stream));
  }
  // Whether buffer c may be written to: nothing before it in this transfer or the last one still leaves it.
  bool empty(int64_t c, int64_t issued) {
    if (c >= slots) return marked(c - slots) < issued && passed(event(marked(c - slots)));
    if (c < slots - by.left) return true;
    if (!passed(by.last())) return false;
    by.left = 0;
    return true;
  }
  bool up_a_step(int64_t& opened, int64_t& issued) {
    if (issued < opened && copied(issued)) return issue(issued++);
    if (opened == chunks || !empty(opened, issued)) return false;
    return ready(opened++);
  }
  bool down_a_step(int64_t& opened, int64_t& issued) {
    if (issued < chunks && (issued < slots || (issued - slots < opened && copied(issued - slots)))) return issue(issued++);
    if (opened == issued || !passed(event(opened))) return false;
    return ready(opened++);
  }
  void drive() {
    int64_t opened = 0, issued = 0;
    auto since = Clock::now();
    for (int64_t turn = 0; !stopped; ++turn) {
      if (up ? up_a_step(opened, issued) : down_a_step(opened, issued)) {
        turn = 0, since = Clock::now();
        if (up && issued == chunks) {
          by.cursor = place(chunks), by.left = std::min(slots, by.left + chunks);
          good(by.record(by.last(), stream));
          return;
        }
        if (!up && opened == chunks) return help();
      } else if ((came == 0 || (turn % 16 == 15 && Clock::now() - since >= patience)) && help_once()) {
        turn = 0;
      } else {
        crew::pause(turn);
      }
    }
  }
  void operator()() {
    if (std::this_thread::get_id() != caller) return help();
    drive();
  }
};

// pinned: bytes; events: one for every buffer and one more; calls: cudaSetDevice, cudaMemcpyAsync, cudaEventRecord, cudaEventQuery.
// Returns its number, by which `staged_copy` knows it; it is kept, and so must be what it was given.
int64_t staging_open(const Input& pinned, Numbers events, Numbers calls, int64_t ordinal) {
  pinned.check("staging_open", "pinned", aoti_torch_dtype_uint8());
  const auto slots = static_cast<int64_t>(events.size()) - 1;
  if (slots < 4 || pinned.numel < slots || calls.size() != 4)
    fail("staging_open: pinned memory for every event but the last, of which there are four or more, and four functions are required");
  const std::lock_guard<std::mutex> lock(stagers_mutex);
  stagers().push_back({static_cast<char*>(pinned.data), pinned.numel / slots, std::move(events), static_cast<int>(ordinal),
                       function_at<int (*)(int)>(calls[0]),
                       function_at<int (*)(void*, const void*, size_t, int, void*)>(calls[1]),
                       function_at<int (*)(void*, void*)>(calls[2]), function_at<int (*)(void*)>(calls[3])});
  return static_cast<int64_t>(stagers().size()) - 1;
}

// `bytes` between addresses on the host and on the device, in the order of a stream; one call at a time for every stager. Chunks have
// `least` to `most` bytes; `workers` threads copy `unit` bytes at a time, the caller among them after `patience` microseconds.
void staged_copy(int64_t stager, int64_t host, int64_t device, int64_t bytes, int64_t least, int64_t most, int64_t unit, int64_t workers,
                 int64_t patience, bool up, bool past_caches, int64_t stream) {
  Stager* by = nullptr;
  {
    const std::lock_guard<std::mutex> lock(stagers_mutex);
    if (stager >= 0 && stager < static_cast<int64_t>(stagers().size())) by = &stagers()[static_cast<size_t>(stager)];
  }
  if (!by || workers < 1 || unit < 1 || least < 1 || most < least || most > by->stride)
    fail("staged_copy: an open stager, threads, units, and chunks that its buffers hold are required");
  if (bytes < 1) return;
  Transfer t{*by,
             reinterpret_cast<char*>(host),
             reinterpret_cast<char*>(device),
             most,
             unit,
             up,
             past_caches,
             handle(stream),
             std::chrono::microseconds(workers > 1 ? patience : 0),
             cut(bytes, least, most, up)};
  if (t.good(by->use(by->ordinal))) crew::run(workers - 1, t);
  if (t.problem) fail("staged_copy: CUDA reports error " + std::to_string(t.problem));
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("staging_open(Tensor pinned, int[] events, int[] calls, int ordinal) -> int");
  m.def(
      "staged_copy(int stager, int host, int device, int bytes, int least, int most, int unit, int workers, int patience, "
      "bool up, bool past_caches, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CompositeExplicitAutograd, m) {
  m.impl("staging_open", BOXED(tensorlogic::ops::staging_open));
  m.impl("staged_copy", BOXED(tensorlogic::ops::staged_copy));
}
