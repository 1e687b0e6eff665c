#include "thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace tensorlogic::crew {

void pause(int64_t turn) {
  if (turn % 256 == 255) return std::this_thread::yield();
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

namespace {

using Clock = std::chrono::steady_clock;
// Before a thread parks. To wake it takes tens of microseconds in a virtual machine, and a caller who waits for a device between two
// transfers comes back within a few hundred.
constexpr auto SPIN = std::chrono::microseconds(400);

// One call's threads. Never destroyed: its threads end with the process.
struct Crew {
  int64_t helpers = 0;
  std::atomic<void (*)(void*)> f{nullptr};
  void* context = nullptr;
  std::atomic<int64_t> wanted{0}, inside{0}, parked{0};
  std::atomic<uint64_t> turn{0};
  std::mutex mutex;
  std::condition_variable condition;
  const pid_t process = getpid();

  // Until there is a turn newer than `seen`.
  uint64_t wait(uint64_t seen) {
    const auto end = Clock::now() + SPIN;
    for (int64_t spun = 0; turn.load() == seen; ++spun) {
      if (spun % 64 == 63 && Clock::now() > end) {
        std::unique_lock<std::mutex> lock(mutex);
        ++parked;  // before it looks at `turn` again: the caller asks the other way round
        condition.wait(lock, [&] { return turn.load() != seen; });
        --parked;
        break;
      }
      pause(spun);
    }
    return turn.load();
  }
  void serve(int64_t me) {
    for (uint64_t seen = 0;;) {
      seen = wait(seen);
      ++inside;  // likewise before it looks whether there is work
      if (const auto work = f.load()) {
        if (me < wanted.load()) work(context);
      }
      --inside;
    }
  }
  bool added() {
    try {
      std::thread([this, me = helpers] { serve(me); }).detach();
    } catch (const std::system_error&) {  // as many threads as there may be: those that are there do it
      return false;
    }
    ++helpers;
    return true;
  }
  void run(int64_t count, void (*work)(void*), void* with) {
    while (helpers < count && added()) {
    }
    context = with, wanted = count;
    f = work;
    ++turn;
    if (parked.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex); }
      condition.notify_all();  // one call of the system for all of them
    }
    work(with);
    f = nullptr;
    for (int64_t spun = 0; inside.load() > 0; ++spun) pause(spun);
  }
  static constexpr int64_t MOST = 64;
};

std::mutex& idle_mutex() {
  static auto* const mutex = new std::mutex;
  return *mutex;
}
std::vector<Crew*>& idle() {
  static auto* const crews = new std::vector<Crew*>;
  return *crews;
}

}  // namespace

void run(int64_t helpers, void (*f)(void*), void* context) {
  if (helpers <= 0) return f(context);
  Crew* crew = nullptr;
  {
    std::lock_guard<std::mutex> lock(idle_mutex());
    auto& crews = idle();
    while (!crew && !crews.empty()) {
      crew = crews.back();
      crews.pop_back();
      if (crew->process != getpid()) crew = nullptr;  // its threads stayed in the parent
    }
  }
  if (!crew) crew = new Crew;
  crew->run(helpers < Crew::MOST ? helpers : Crew::MOST, f, context);
  std::lock_guard<std::mutex> lock(idle_mutex());
  idle().push_back(crew);
}

}  // namespace tensorlogic::crew
