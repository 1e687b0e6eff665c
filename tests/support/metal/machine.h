// How a kernel is run: threads as fibers, groups one after another, threadgroup memory that notices races.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "types.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#define STANDIN_FIBERS 1
#endif

// standin_switch(from, to): keep this stack pointer in *from and go on with the stack `to`. Only what a called function must
// preserve is kept on the stack; system calls, which swapcontext makes, would take most of the time.
extern "C" void standin_switch(void** from, void* to) __asm__("standin_switch");
#if defined(__x86_64__)
#define STANDIN_KEPT 6  // words on a waiting stack before the address to return to
__asm__(R"(
.text
.p2align 4
.globl standin_switch
standin_switch:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");
#elif defined(__aarch64__)
#define STANDIN_KEPT 19
__asm__(R"(
.text
.p2align 4
.globl standin_switch
standin_switch:
  sub sp, sp, #160
  stp d8, d9, [sp, #0]
  stp d10, d11, [sp, #16]
  stp d12, d13, [sp, #32]
  stp d14, d15, [sp, #48]
  stp x19, x20, [sp, #64]
  stp x21, x22, [sp, #80]
  stp x23, x24, [sp, #96]
  stp x25, x26, [sp, #112]
  stp x27, x28, [sp, #128]
  stp x29, x30, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp d8, d9, [sp, #0]
  ldp d10, d11, [sp, #16]
  ldp d12, d13, [sp, #32]
  ldp d14, d15, [sp, #48]
  ldp x19, x20, [sp, #64]
  ldp x21, x22, [sp, #80]
  ldp x23, x24, [sp, #96]
  ldp x25, x26, [sp, #112]
  ldp x27, x28, [sp, #128]
  ldp x29, x30, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "fibers are written for x86-64 and AArch64"
#endif

namespace standin {

using namespace metal;

enum State { RUNNING, AT_BARRIER, AT_SIMDGROUP, DONE };
constexpr uint WIDTH = 32;
constexpr size_t STACK = 1 << 16;

struct Lane {
  void* top;  // of its stack while it waits
  char* stack;
  State state;
  const char* where;  // what it waits for
  int site;  // and in which line
  uint index, barriers, pauses;  // in the group; barriers passed by the group and by the simdgroup
  uint collectives, addresses;  // operations of the simdgroup that it took part in
  uint3 position;
  void* fake;
};

struct Simdgroup {
  float values[2][4][WIDTH];  // of two operations in turn: the next may begin before all have read
  uint votes[2][WIDTH];
  std::vector<std::pair<const void*, long>> addresses;  // of its matrices, in order
};

struct Launch {
  void** arguments;
  uint64_t threads[3], group[3];
  int order;  // 0: threads and groups upwards, 1: downwards, else: shuffled by this seed
  char* message;
  uint64_t room;
};

struct Machine {
  Launch* launch;
  void (*body)(void**);
  std::vector<Lane> lanes;
  std::vector<std::unique_ptr<char[]>> stacks;
  std::vector<Simdgroup> simdgroups;
  Lane* lane;
  void* home;
  void* home_fake;
  const void* home_stack;
  size_t home_size;
  uint3 group, size, grid;
  uint serial;  // of the group, over all launches: threadgroup memory of another one does not count
  bool failed;
};
inline Machine machine;

inline void to_lane(Lane& lane) {
  machine.lane = &lane;
#if STANDIN_FIBERS
  __sanitizer_start_switch_fiber(&machine.home_fake, lane.stack, STACK);
#endif
  standin_switch(&machine.home, lane.top);
#if STANDIN_FIBERS
  __sanitizer_finish_switch_fiber(machine.home_fake, nullptr, nullptr);
#endif
}

inline void to_home(Lane& lane) {
#if STANDIN_FIBERS
  __sanitizer_start_switch_fiber(lane.state == DONE ? nullptr : &lane.fake, machine.home_stack, machine.home_size);
#endif
  standin_switch(&lane.top, machine.home);
#if STANDIN_FIBERS
  __sanitizer_finish_switch_fiber(lane.fake, nullptr, nullptr);
#endif
}

inline void wait(State state, const char* where, int site = 0) {
  Lane& lane = *machine.lane;
  lane.state = state, lane.where = where, lane.site = site;
  to_home(lane);
}

template <class... A> void fail(const char* format, A... values) {
  if (!machine.failed) {
    char text[400];
    std::snprintf(text, sizeof text, format, values...);
    const Lane& l = *machine.lane;
    const uint3& g = machine.group;
    std::snprintf(machine.launch->message, machine.launch->room, "%s (thread %u of group %u, %u, %u)", text, l.index, g.x,
                  g.y, g.z);
  }
  machine.failed = true;
}

template <class... A> [[noreturn]] void stop(const char* format, A... values) {  // from inside a thread: it does not go on
  fail(format, values...);
  for (;;) wait(DONE, "stopped");
}

// Threadgroup memory: a value, and who wrote and read it since which barrier.
struct Touch {
  uint serial = 0, barriers = 0, pauses = 0, lane = 0;
  bool many = false;
  // whether another thread of this group touched it with nothing between then and now
  bool clashes(const Lane& l) const {
    if (serial != machine.serial || barriers != l.barriers || (lane == l.index && !many)) return false;
    return many || lane / WIDTH != l.index / WIDTH || pauses == l.pauses;
  }
  void note(const Lane& l) {
    many = serial == machine.serial && barriers == l.barriers && pauses == l.pauses && (many || lane != l.index);
    serial = machine.serial, barriers = l.barriers, pauses = l.pauses, lane = l.index;
  }
};

template <class T> struct shared {
  T value;
  mutable Touch wrote, read;
  operator T() const {
    const Lane& l = *machine.lane;
    if (wrote.serial != machine.serial) stop("threadgroup memory is read that nobody wrote");
    if (wrote.clashes(l)) stop("threadgroup memory is read that thread %u wrote without a barrier between", wrote.lane);
    read.note(l);
    return value;
  }
  template <class U = T, std::enable_if_t<!std::is_same_v<U, float>, int> = 0> explicit operator float() const {
    return float(T(*this));
  }
  void set(T v) {
    const Lane& l = *machine.lane;
    if (wrote.clashes(l)) stop("threadgroup memory is written that thread %u wrote without a barrier between", wrote.lane);
    if (read.clashes(l)) stop("threadgroup memory is written that thread %u read without a barrier between", read.lane);
    wrote.note(l);
    value = v;
  }
  shared& operator=(T v) { return set(v), *this; }
  shared& operator=(const shared& o) { return set(T(o)), *this; }
  shared& operator+=(T v) { return set(T(T(*this) + v)), *this; }
};

inline void entry() {
  Lane& lane = *machine.lane;
#if STANDIN_FIBERS
  __sanitizer_finish_switch_fiber(nullptr, &machine.home_stack, &machine.home_size);
#endif
  machine.body(machine.launch->arguments);
  lane.state = DONE;
  to_home(lane);
}

// Let waiting threads go on, the lanes of a simdgroup together, else the whole group; false when all are done.
inline bool release() {
  auto& lanes = machine.lanes;
  bool released = false, done = true;
  for (uint first = 0; first < lanes.size(); first += WIDTH) {
    uint end = uint(min(first + WIDTH, long(lanes.size()))), waiting = 0;
    for (uint i = first; i < end; i++) waiting += lanes[i].state == AT_SIMDGROUP && lanes[i].where == lanes[first].where;
    if (waiting != end - first) continue;
    for (uint i = first; i < end; i++) lanes[i].state = RUNNING;
    released = true;
  }
  if (released) return true;
  for (Lane& lane : lanes) {
    done &= lane.state == DONE;
    bool same = lane.state == lanes[0].state && lane.where == lanes[0].where && lane.site == lanes[0].site;
    if (same && lane.state != AT_SIMDGROUP) continue;
    machine.lane = &lane;
    return fail("threads wait at different places: one %s, thread 0 %s", lane.where, lanes[0].where), false;
  }
  if (done) return false;
  for (Lane& lane : lanes) lane.state = RUNNING, lane.barriers++, lane.pauses = 0;
  return true;
}

inline void run_group(const std::vector<uint>& order) {
  machine.serial++;
  for (auto& s : machine.simdgroups) s.addresses.clear();
  for (uint i = 0; i < machine.lanes.size(); i++) {
    Lane& lane = machine.lanes[i];
    const uint3& n = machine.size;
    lane.index = i, lane.state = RUNNING, lane.where = "has finished", lane.site = 0, lane.barriers = lane.pauses = 0;
    lane.collectives = lane.addresses = 0;
    lane.position = uint3(i % n.x, i / n.x % n.y, i / (n.x * n.y));
    uintptr_t end = reinterpret_cast<uintptr_t>(lane.stack) + STACK;
    lane.top = reinterpret_cast<void*>((end & ~uintptr_t(15)) - 256);
    static_cast<void**>(lane.top)[STANDIN_KEPT] = reinterpret_cast<void*>(entry);
  }
  do {
    for (uint i : order)
      if (machine.lanes[i].state == RUNNING && !machine.failed) {
        machine.lanes[i].where = "has finished", machine.lanes[i].site = 0;
        to_lane(machine.lanes[i]);
      }
  } while (!machine.failed && release());
}

inline std::vector<uint> ordered(uint64_t count, int order) {
  std::vector<uint> found(count);
  for (uint i = 0; i < count; i++) found[i] = order == 1 ? uint(count) - 1 - i : i;
  uint64_t state = uint64_t(order) * 0x9E3779B97F4A7C15u + 1;
  for (uint i = uint(count); order > 1 && i > 1; i--) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    std::swap(found[i - 1], found[(state >> 33) % i]);
  }
  return found;
}

inline int run(Launch* launch, void (*body)(void**)) {
  Machine& m = machine;
  const uint64_t *t = launch->threads, *g = launch->group, count = g[0] * g[1] * g[2];
  m.launch = launch, m.body = body, m.failed = false;
  m.size = uint3(uint(g[0]), uint(g[1]), uint(g[2]));
  for (int i = 0; i < 3; i++)
    if (g[i] == 0 || t[i] == 0 || t[i] % g[i] != 0) {
      std::snprintf(launch->message, launch->room, "threads are no multiple of the group");
      return 1;
    }
  if (count > 1024) {
    std::snprintf(launch->message, launch->room, "a group of %lu threads; Metal takes 1024", count);
    return 1;
  }
  m.grid = uint3(uint(t[0] / g[0]), uint(t[1] / g[1]), uint(t[2] / g[2]));
  if (m.lanes.size() != count) {
    m.lanes.resize(count);
    while (m.stacks.size() < count) m.stacks.emplace_back(new char[STACK]);  // kept: fresh pages are slow
    for (uint i = 0; i < count; i++) m.lanes[i].stack = m.stacks[i].get();
    m.simdgroups.resize((count + WIDTH - 1) / WIDTH);
  }
  std::vector<uint> order = ordered(count, launch->order);
  uint64_t groups = uint64_t(m.grid.x) * m.grid.y * m.grid.z;
  for (uint i : ordered(groups, launch->order)) {
    m.group = uint3(i % m.grid.x, i / m.grid.x % m.grid.y, i / (m.grid.x * m.grid.y));
    run_group(order);
    if (m.failed) return 1;
  }
  return 0;
}

}  // namespace standin
