#include "isa.h"

#include <atomic>
#include <stdexcept>

namespace tensorlogic {

namespace portable {
extern const Kernels table;
}
#if defined(__x86_64__)
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

#if defined(__x86_64__)
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif

const Kernels* level(const std::string& name) {
  if (name == "portable") return &portable::table;
#if defined(__x86_64__)
  if (name == "avx2" && has_avx2()) return &avx2::table;
  if (name == "avx512" && has_avx512()) return &avx512::table;
#endif
  return nullptr;
}

const Kernels* best() {
  for (const char* name : {"avx512", "avx2"})
    if (const Kernels* found = level(name)) return found;
  return &portable::table;
}

std::atomic<const Kernels*>& current() {
  static std::atomic<const Kernels*> table{best()};
  return table;
}

}  // namespace

const Kernels& kernels() { return *current().load(std::memory_order_relaxed); }

std::string isa_name() { return kernels().name; }

std::string isa_features() {
  std::string found = "portable";
#if defined(__x86_64__)
#define FEATURE(name) \
  if (__builtin_cpu_supports(name)) found += "," name;
  FEATURE("f16c")
  FEATURE("fma") FEATURE("avx512vnni") FEATURE("avx512bf16")
#undef FEATURE
      if (has_avx2()) found += ",avx2";
  if (has_avx512()) found += ",avx512";
#elif defined(__aarch64__)
  found += ",neon";
#endif
  return found;
}

std::string set_isa(const std::string& name) {
  const Kernels* wanted = name == "auto" ? best() : level(name);
  if (!wanted)
    throw std::runtime_error("set_isa: '" + name +
                             "' is not one of this machine's levels: " + isa_features());
  return current().exchange(wanted)->name;
}

}  // namespace tensorlogic
