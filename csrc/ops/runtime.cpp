// Operators without tensor arguments: the pool's controls, allocation from it, and the instruction
// set in use.
#include "isa.h"
#include "stable_abi.h"
#include "pool.h"

namespace tensorlogic::ops {
namespace {

using Numbers = std::vector<int64_t>;

Output empty(Numbers size, int32_t code) {
  return make(code, {size.data(), static_cast<int64_t>(size.size())});
}
Output zeros(Numbers size, int32_t code) {
  return make(code, {size.data(), static_cast<int64_t>(size.size())}, true);
}

std::string isa() { return isa_name(); }
std::string features() { return isa_features(); }
std::string choose_isa(std::string level) { return set_isa(level); }
bool goes_past_caches(int64_t bytes) { return past_caches(bytes); }

}  // namespace
}  // namespace tensorlogic::ops

STABLE_TORCH_LIBRARY_FRAGMENT(tensorlogic_native, m) {
  m.def("empty(int[] size, ScalarType dtype) -> Tensor");
  m.def("zeros(int[] size, ScalarType dtype) -> Tensor");
  m.def("isa() -> str");
  m.def("features() -> str");
  m.def("set_isa(str level) -> str");
  m.def("past_caches(int bytes) -> bool");
  m.def("pool_stats() -> int[]");
  m.def("pool_classes() -> int[]");
  m.def("pool_configure(int max_bytes, int max_buffers_per_size) -> ()");
  m.def("pool_shrink(int max_bytes) -> int");
  m.def("pool_reset_counters() -> ()");
  m.def("pool_disable(int change) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(tensorlogic_native, CompositeExplicitAutograd, m) {
  using namespace tensorlogic::ops;
  namespace pool = tensorlogic::pool;
  m.impl("empty", BOXED(empty));
  m.impl("zeros", BOXED(zeros));
  m.impl("isa", BOXED(isa));
  m.impl("features", BOXED(features));
  m.impl("set_isa", BOXED(choose_isa));
  m.impl("past_caches", BOXED(goes_past_caches));
  m.impl("pool_stats", BOXED(pool::stats));
  m.impl("pool_classes", BOXED(pool::classes));
  m.impl("pool_configure", BOXED(pool::configure));
  m.impl("pool_shrink", BOXED(pool::shrink));
  m.impl("pool_reset_counters", BOXED(pool::reset_counters));
  m.impl("pool_disable", BOXED(pool::disable));
}
