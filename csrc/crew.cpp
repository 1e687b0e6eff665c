#include "crew.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
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

struct Helper {
  std::atomic<uint64_t> asked{0};
  std::atomic<bool> parked{false};
  std::mutex mutex;
  std::condition_variable condition;

  // Until it is asked for something newer than `seen`.
  uint64_t wait(uint64_t seen) {
    const auto end = Clock::now() + SPIN;
    for (int64_t turn = 0; asked.load() == seen; ++turn) {
      if (turn % 64 == 63 && Clock::now() > end) {
        std::unique_lock<std::mutex> lock(mutex);
        parked = true;
        condition.wait(lock, [&] { return asked.load() != seen; });
        parked = false;
        break;
      }
      pause(turn);
    }
    return asked.load();
  }
  void ask(uint64_t turn) {
    asked = turn;
    if (!parked) return;  // it looks at `asked` after it says that it parks
    { std::lock_guard<std::mutex> lock(mutex); }
    condition.notify_one();
  }
};

// One call's threads. Never destroyed: its threads end with the process.
struct Crew {
  std::vector<std::unique_ptr<Helper>> helpers;
  std::atomic<void (*)(void*)> f{nullptr};
  void* context = nullptr;
  int64_t wanted = 0;
  uint64_t turn = 0;
  std::atomic<int64_t> inside{0};
  const pid_t process = getpid();

  void serve(int64_t i) {
    Helper& me = *helpers[static_cast<size_t>(i)];
    for (uint64_t seen = 0;;) {
      seen = me.wait(seen);
      ++inside;  // before it looks whether there is work: the caller asks the other way round
      if (const auto work = f.load()) {
        wake(2 * i + 2);
        wake(2 * i + 3);
        work(context);
      }
      --inside;
    }
  }
  void wake(int64_t i) {
    if (i < wanted) helpers[static_cast<size_t>(i)]->ask(turn);
  }
  bool added() {
    helpers.push_back(std::make_unique<Helper>());
    try {
      std::thread([this, i = static_cast<int64_t>(helpers.size()) - 1] { serve(i); }).detach();
    } catch (const std::system_error&) {  // as many threads as there may be: those that are there do it
      helpers.pop_back();
      return false;
    }
    return true;
  }
  void run(int64_t count, void (*work)(void*), void* with) {
    if (helpers.capacity() == 0) helpers.reserve(MOST);
    while (static_cast<int64_t>(helpers.size()) < count && added()) {
    }
    context = with, wanted = std::min(count, static_cast<int64_t>(helpers.size())), ++turn;
    f = work;
    wake(0);
    wake(1);
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
