// Threads that wait for work between calls: spinning for a while, then parked. For work that mostly waits for something else than a
// processor, beside PyTorch's own threads.
#pragma once

#include <stdint.h>

namespace tensorlogic::crew {

// f(context) on the calling thread and on up to `helpers` others, which may come late or not at all; returns when all that came are
// done. Calls at the same time have threads of their own. f must not throw.
void run(int64_t helpers, void (*f)(void*), void* context);

// Gives way to the processor's other thread, and now and then to others; `turn` counts the calls of one wait.
void pause(int64_t turn);

template <class F>
void run(int64_t helpers, F& f) {
  run(helpers, [](void* p) { (*static_cast<F*>(p))(); }, &f);
}

}  // namespace tensorlogic::crew
