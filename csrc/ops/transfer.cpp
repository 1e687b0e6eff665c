// Ordinary memory to and from a GPU through pinned buffers: each thread copies pieces between memory and buffers
// of its own while the copy engine moves those before them. CUDA's functions come as addresses from the
// caller, so that this library is linked to none of it.
#include <algorithm>
#include <atomic>
#include <cstring>

#include "isa.h"
#include "op.h"

namespace tensorlogic::ops {
namespace {

using Numbers = std::vector<int64_t>;
constexpr int64_t SLOTS = 2;  // buffers of a thread: one is copied while the other one is moved

template <class F>
F function_at(int64_t address) {
  static_assert(sizeof(F) == sizeof(address));
  F f;
  memcpy(&f, &address, sizeof f);
  return f;
}

struct Transfer {
  char *host, *device, *pinned;
  int64_t bytes, chunk, pieces;
  bool up, past_caches;
  int ordinal;
  void* stream;
  const Numbers& events;
  // cudaSetDevice, cudaMemcpyAsync, cudaEventRecord, cudaEventSynchronize
  int (*use)(int);
  int (*move)(void*, const void*, size_t, int, void*);
  int (*record)(void*, void*);
  int (*wait)(void*);
  std::atomic<int64_t> next{0};
  std::atomic<int> problem{0};

  bool good(int status) {
    if (status) problem.store(status);
    return status == 0;
  }
  int64_t size(int64_t piece) const { return std::min(chunk, bytes - piece * chunk); }
  char* buffer(int64_t slot) const { return pinned + slot * chunk; }
  void* event(int64_t slot) const { return reinterpret_cast<void*>(events[static_cast<size_t>(slot)]); }

  void copy(char* to, const char* from, int64_t n) const {
    const int64_t floats = past_caches ? n / 4 : 0;
    if (floats) kernels().convert(DType::f32, DType::f32, from, to, floats, true);
    memcpy(to + 4 * floats, from + 4 * floats, static_cast<size_t>(n - 4 * floats));
  }
  // The next piece, begun in this slot; -1 where there is none.
  int64_t begin(int64_t slot) {
    const int64_t piece = next.fetch_add(1);
    if (piece >= pieces || problem.load()) return -1;
    char* const there = device + piece * chunk;
    if (up) {
      if (!good(wait(event(slot)))) return -1;  // until what was in the buffer before has left it
      copy(buffer(slot), host + piece * chunk, size(piece));
    }
    constexpr int TO_DEVICE = 1, TO_HOST = 2;
    const int status = up ? move(there, buffer(slot), static_cast<size_t>(size(piece)), TO_DEVICE, stream)
                          : move(buffer(slot), there, static_cast<size_t>(size(piece)), TO_HOST, stream);
    return good(status) && good(record(event(slot), stream)) ? piece : -1;
  }
  void work(int64_t worker) {
    if (!good(use(ordinal))) return;
    int64_t begun[SLOTS], left = 0;
    const int64_t first = worker * SLOTS;
    for (int64_t s = 0; s < SLOTS; ++s) left += (begun[s] = begin(first + s)) >= 0;
    for (int64_t s = 0; left > 0; s = (s + 1) % SLOTS) {
      if (begun[s] < 0) continue;
      if (!up) {
        if (!good(wait(event(first + s)))) return;
        copy(host + begun[s] * chunk, buffer(first + s), size(begun[s]));
      }
      begun[s] = begin(first + s);
      left -= begun[s] < 0;
    }
  }
};

// host: bytes; pinned: bytes, 2 chunks a worker, which has two of the events; calls: the four functions of Transfer.
void staged_copy(const Input& host, const Input& pinned, Numbers events, Numbers calls, int64_t device,
                 int64_t chunk, int64_t workers, bool up, bool past_caches, int64_t ordinal, int64_t stream) {
  host.check("staged_copy", "host", aoti_torch_dtype_uint8());
  pinned.check("staged_copy", "pinned", aoti_torch_dtype_uint8());
  const int64_t slots = workers * SLOTS;
  if (workers < 1 || chunk < 1 || pinned.numel < slots * chunk || static_cast<int64_t>(events.size()) < slots || calls.size() != 4)
    fail("staged_copy: two chunks of pinned memory and two events a worker, and four functions are required");
  Transfer t{static_cast<char*>(host.data), reinterpret_cast<char*>(device), static_cast<char*>(pinned.data),
             host.numel, chunk, (host.numel + chunk - 1) / chunk, up, past_caches, static_cast<int>(ordinal),
             reinterpret_cast<void*>(stream), events,
             function_at<int (*)(int)>(calls[0]),
             function_at<int (*)(void*, const void*, size_t, int, void*)>(calls[1]),
             function_at<int (*)(void*, void*)>(calls[2]), function_at<int (*)(void*)>(calls[3])};
  parallel(std::min(workers, t.pieces), 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t w = begin; w < end; ++w) t.work(w);
  });
  if (t.problem.load()) fail("staged_copy: CUDA reports error " + std::to_string(t.problem.load()));
}

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def(
      "staged_copy(Tensor host, Tensor pinned, int[] events, int[] calls, int device, int chunk, int workers, bool up, "
      "bool past_caches, int ordinal, int stream) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CPU, m) {
  m.impl("staged_copy", BOXED(tensorlogic::ops::staged_copy));
}
