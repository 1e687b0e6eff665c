// Ordinary memory to and from a GPU through a ring of pinned memory: a crew of threads copies units between memory and the ring, while
// the copy engine moves what lies there in order. To the GPU a chunk is what has been copied by the time the engine wants more, so that
// neither a slow thread nor a cold page leaves it idle for long; from the GPU chunks halve to the end, which is waited for. The caller
// alone calls CUDA, and leaves copying to its crew: it keeps its caches for what it does next. CUDA's functions come as addresses, so
// that this library is linked to none of it.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

#include "thread_pool.h"
#include "transfer.h"
#include "isa.h"
#include "stable_abi.h"

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
int64_t microseconds() { return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now().time_since_epoch()).count(); }

// What a copy engine takes, about: a faster one waits for chunks that could have come earlier, a slower one gets more of them.
constexpr int64_t BYTES_A_US = 55000, CHUNK_US = 3, CALL_US = 8;
constexpr int64_t MARKED = 4 << 20;  // bytes after which the engine says how far it is: it takes time for that

// How copies are stored. An engine reads memory and the cache that all processors share at the same rate, but slower the faster threads
// store past the caches meanwhile (16 MiB in 341 us beside 4 of them, 612 beside 14, instead of 319: H200); slowest are the caches of
// single processors, which keep what was stored last; to give lines up as they are stored takes a thread half as long again.
enum class Stores : int64_t { usual, past_caches, given_up, both };  // both: past the caches and given up, in turns

void copy_given_up(char* to, const char* from, int64_t n) {
#if defined(__x86_64__)
  constexpr int64_t LINE = 64;
  for (; n >= LINE; n -= LINE, to += LINE, from += LINE) {
    memcpy(to, from, LINE);
    asm volatile("cldemote %0" : : "m"(*to) : "memory");  // which processors without it take for nothing
  }
#endif
  memcpy(to, from, static_cast<size_t>(n));
}

// The ring of a device and direction, and CUDA's functions. Places in it are counted from its first transfer on, in units.
struct Stager {
  char* pinned;
  int64_t bytes;
  Numbers events;
  int ordinal;
  int (*use)(int);
  int (*move)(void*, const void*, size_t, int, void*);
  int (*record)(void*, void*);
  int (*query)(void*);

  struct alignas(64) Place {
    std::atomic<int64_t> copied{0};  // the unit that was copied last to or from it, and one
  };
  struct Mark {
    void* event;
    int64_t end;  // the unit before which everything has passed the engine when it has passed the event
  };
  int64_t unit = 0, slots = 0;
  std::unique_ptr<Place[]> places;
  int64_t head = 0, passed = 0;  // units that were ever given a place, and how many of them have passed the engine
  std::deque<Mark> marks;
  size_t next_event = 0;
  std::mutex turn;  // of its transfers

  // Units of another size have other places: for an empty ring.
  void cut(int64_t size) {
    constexpr int NOT_READY = 600;
    if (unit == size) return;
    for (; !marks.empty(); marks.pop_front())
      for (int64_t turn = 0; query(marks.front().event) == NOT_READY; ++turn) crew::pause(turn);
    unit = size, slots = bytes / size, head = passed = 0;
    places = std::make_unique<Place[]>(static_cast<size_t>(slots));
  }
};
std::mutex stagers_mutex;
std::deque<Stager>& stagers() {  // which stay where they are
  static auto* const kept = new std::deque<Stager>;
  return *kept;
}

struct Transfer {
  Stager& by;
  char *host, *device;
  const int64_t bytes, least, most;  // the latter two in units: of a chunk
  const bool up;
  const Stores stores;
  void* stream;
  const int64_t patience;  // microseconds of the caller, before it copies, too
  const transfer::Made made;
  const int64_t unit = by.unit, units = (bytes + unit - 1) / unit, base = by.head;
  const std::thread::id caller = std::this_thread::get_id();
  alignas(64) std::atomic<int64_t> next{0};  // unit to be copied
  alignas(64) std::atomic<int64_t> open{0};  // units that may be copied
  std::atomic<bool> stopped{false};
  std::atomic<int64_t> came{0};  // of the crew
  int problem = 0;
  int64_t issued = 0, done = 0, marked = 0, busy = 0;

  bool good(int status) {
    if (status) problem = status, stopped = true;
    return status == 0;
  }
  Stager::Place& place(int64_t u) const { return by.places[static_cast<size_t>((base + u) % by.slots)]; }
  char* pin(int64_t u) const { return by.pinned + (base + u) % by.slots * unit; }
  int64_t together(int64_t u) const { return by.slots - (base + u) % by.slots; }  // units before the end of the ring

  void copy(Stores how, char* to, const char* from, int64_t n) const {
    if (how == Stores::given_up) return copy_given_up(to, from, n);
    const int64_t floats = how == Stores::past_caches ? n / 4 : 0;
    if (floats) kernels().convert(DType::f32, DType::f32, from, to, floats, true);
    memcpy(to + 4 * floats, from + 4 * floats, static_cast<size_t>(n - 4 * floats));
  }
  void copy_unit(int64_t u) {
    char *const mine = host + u * unit, *const there = pin(u);
    const Stores how = stores != Stores::both ? stores : u % 2 ? Stores::given_up : Stores::past_caches;
    copy(how, up ? there : mine, up ? mine : there, std::min(unit, bytes - u * unit));
    place(u).copied.store(base + u + 1, std::memory_order_release);
  }
  void look() {  // how many units were copied, all those before them, too
    while (done < open && place(done).copied.load(std::memory_order_acquire) == base + done + 1) ++done;
  }
  // One of the crew: units in their order, each when its place is ready.
  void help() {
    ++came;
    for (;;) {
      const int64_t u = next.fetch_add(1);
      if (u >= units) return;
      for (int64_t turn = 0; open.load(std::memory_order_acquire) <= u; ++turn) {
        if (stopped) return;
        crew::pause(turn);
      }
      copy_unit(u);
    }
  }
  // The caller: one unit, where there is one that need not be waited for.
  bool help_once() {
    int64_t u = next.load();
    if (u >= units || u >= open.load()) return false;
    if (next.compare_exchange_strong(u, u + 1)) copy_unit(u);
    return true;
  }

  bool issue(int64_t n) {
    constexpr int TO_DEVICE = 1, TO_HOST = 2;
    char *const there = device + issued * unit, *const here = pin(issued);
    const auto size = static_cast<size_t>(std::min(n * unit, bytes - issued * unit));
    if (!good(up ? by.move(there, here, size, TO_DEVICE, stream) : by.move(here, there, size, TO_HOST, stream))) return false;
    issued += n;
    return true;
  }
  bool room() const { return by.marks.size() < by.events.size(); }
  bool mark() {
    void* const event = handle(by.events[by.next_event]);
    by.next_event = (by.next_event + 1) % by.events.size();
    by.marks.push_back({event, base + issued});
    return good(by.record(event, stream));
  }
  // Whether the engine has passed the oldest mark.
  bool reached() {
    constexpr int NOT_READY = 600;
    if (by.marks.empty()) return false;
    const int status = by.query(by.marks.front().event);
    if (status == NOT_READY || !good(status)) return false;
    by.passed = by.marks.front().end;
    by.marks.pop_front();
    return true;
  }

  // The memory that the transfer goes to, where it was not given; once.
  bool have(char*& where) {
    if (where || !made.make) return true;
    where = made.make(made.context);
    return where || good(transfer::NOT_MADE);
  }

  bool up_a_step() {
    if (!have(device)) return false;
    look();
    const int64_t ready = done - issued, now = ready ? microseconds() : 0;
    if (ready && (done == units || ready >= most || (ready >= least && now + CALL_US >= busy))) {
      const int64_t n = std::min({ready, most, together(issued)});
      const bool last = issued + n == units, due = last || (issued + n - marked) * unit >= std::min(MARKED, by.bytes / 4);
      if (due && !room()) return reached();
      if (!issue(n) || (due && !mark())) return false;
      if (due) marked = issued;
      busy = std::max(now, busy) + CHUNK_US + n * unit / BYTES_A_US;
      return true;
    }
    if (open == units) return false;
    const int64_t free = std::min(units, by.passed + by.slots - base);
    if (free == open) return reached();
    open = free;
    return true;
  }
  bool down_a_step() {
    if (issued < units && room()) {
      const int64_t left = units - issued;
      const int64_t n = std::min({std::max(least, left / 2), left, most, together(issued)});
      if (issued + n - done > by.slots) look();
      if (issued + n - done <= by.slots) return issue(n) && mark();
    }
    if (!have(host) || !reached()) return false;
    open = by.passed - base;
    return true;
  }
  bool all() const { return (up ? issued : open.load()) == units; }
  void drive() {
    if (up) open = std::min(units, by.passed + by.slots - base);  // before anything else: the crew begins to copy
    auto since = microseconds();
    for (int64_t turn = 0; !stopped && !all(); ++turn) {
      if (up ? up_a_step() : down_a_step()) {
        turn = 0, since = microseconds();
      } else if ((came == 0 || (turn % 16 == 15 && microseconds() - since >= patience)) && help_once()) {
        turn = 0;
      } else {
        crew::pause(turn);
      }
    }
    if (!up && !stopped) help();
  }
  void operator()() {
    if (std::this_thread::get_id() != caller) return help();
    drive();
  }
};

// pinned: bytes; events: four or more; calls: cudaSetDevice, cudaMemcpyAsync, cudaEventRecord, cudaEventQuery.
// Returns its number, by which `staged_copy` knows it; it is kept, and so must be what it was given.
int64_t staging_open(const Input& pinned, Numbers events, Numbers calls, int64_t ordinal) {
  pinned.check("staging_open", "pinned", aoti_torch_dtype_uint8());
  if (events.size() < 4 || pinned.numel < 4 || calls.size() != 4)
    fail("staging_open: pinned memory, four events or more, and four functions are required");
  const std::lock_guard<std::mutex> lock(stagers_mutex);
  stagers().emplace_back();
  Stager& made = stagers().back();
  made.pinned = static_cast<char*>(pinned.data), made.bytes = pinned.numel;
  made.events = std::move(events), made.ordinal = static_cast<int>(ordinal);
  made.use = function_at<int (*)(int)>(calls[0]);
  made.move = function_at<int (*)(void*, const void*, size_t, int, void*)>(calls[1]);
  made.record = function_at<int (*)(void*, void*)>(calls[2]);
  made.query = function_at<int (*)(void*)>(calls[3]);
  return static_cast<int64_t>(stagers().size()) - 1;
}

}  // namespace
}  // namespace tensorlogic::ops

namespace tensorlogic::transfer {

int64_t move(int64_t stager, char* host, char* device, int64_t bytes, bool up, const How& how, void* stream, Made made) {
  ops::Stager* by = nullptr;
  {
    const std::lock_guard<std::mutex> lock(ops::stagers_mutex);
    if (stager >= 0 && stager < static_cast<int64_t>(ops::stagers().size())) by = &ops::stagers()[static_cast<size_t>(stager)];
  }
  if (!by || how.workers < 1 || how.unit < 1 || how.least < 1 || how.most < how.least || how.unit > by->bytes / 4 || how.stores < 0 ||
      how.stores > 3)
    return MISUSED;
  if (bytes < 1) return 0;
  const std::lock_guard<std::mutex> turn(by->turn);
  by->cut(how.unit);
  ops::Transfer t{*by,
                  host,
                  device,
                  bytes,
                  std::max<int64_t>(1, how.least / how.unit),
                  std::max<int64_t>(1, how.most / how.unit),
                  up,
                  static_cast<ops::Stores>(how.stores),
                  stream,
                  how.workers > 1 ? how.patience : 0,
                  made};
  if (t.good(by->use(by->ordinal))) crew::run(how.workers - 1, t);
  by->head += t.units;
  if (t.problem) by->unit = 0;  // nothing is known of its places
  return t.problem;
}

AtenTensorHandle memory(int32_t dtype, const int64_t* sizes, int64_t dim) { return make(dtype, {sizes, dim}).release(); }

}  // namespace tensorlogic::transfer

namespace tensorlogic::ops {
namespace {

// The same by numbers alone.
int64_t moved(int64_t stager, int64_t host, int64_t device, int64_t bytes, int64_t least, int64_t most, int64_t unit, int64_t workers,
              int64_t patience, int64_t up, int64_t stores, int64_t stream) {
  return transfer::move(stager, static_cast<char*>(handle(host)), static_cast<char*>(handle(device)), bytes, up != 0,
                        {least, most, unit, workers, patience, stores}, handle(stream));
}

// The same as an operator, which raises what is wrong.
void staged_copy(int64_t stager, int64_t host, int64_t device, int64_t bytes, int64_t least, int64_t most, int64_t unit, int64_t workers,
                 int64_t patience, bool up, int64_t stores, int64_t stream) {
  const int64_t wrong = moved(stager, host, device, bytes, least, most, unit, workers, patience, up, stores, stream);
  if (wrong == transfer::MISUSED)
    fail("staged_copy: an open stager, threads, chunks, stores, and units of which its memory holds four are required");
  if (wrong) fail("staged_copy: CUDA reports error " + std::to_string(wrong));
}

// Where `moved` is: to call an operator with so many arguments takes longer than half a chunk's copy.
int64_t staged_copy_address() {
  int64_t (*const f)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t) = moved;
  int64_t address;
  static_assert(sizeof(f) == sizeof(address));
  memcpy(&address, &f, sizeof f);
  return address;
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("staging_open(Tensor pinned, int[] events, int[] calls, int ordinal) -> int");
  m.def(
      "staged_copy(int stager, int host, int device, int bytes, int least, int most, int unit, int workers, int patience, "
      "bool up, int stores, int stream) -> ()");
  m.def("staged_copy_address() -> int");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CompositeExplicitAutograd, m) {
  m.impl("staging_open", BOXED(tensorlogic::ops::staging_open));
  m.impl("staged_copy", BOXED(tensorlogic::ops::staged_copy));
  m.impl("staged_copy_address", BOXED(tensorlogic::ops::staged_copy_address));
}
