#include "isa.h"

#include <atomic>
#include <stdexcept>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(TENSORLOGIC_AMX) && defined(__linux__)  // elsewhere nobody gives a process the tiles
#include <sys/syscall.h>
#include <unistd.h>

#include "isa/amx.h"
#define HAS_TILES 1
#endif

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
namespace avx512_bf16 {
void gemm_or_pairs(const GemmCall&);
}
namespace avx512_vnni {
void gemm_steps(const GemmCall&);
}
namespace avx2_steps {
void gemm_steps(const GemmCall&);
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
int family() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  __get_cpuid(1, &a, &b, &c, &d);
  return static_cast<int>((a >> 8 & 15) + (a >> 20 & 255));
}
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

#if defined(HAS_TILES)
// The processor and the system have the tiles, and the system gives this process their state.
bool has_amx() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!has_avx512_bf16() || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  constexpr unsigned BF16 = 1u << 22, TILES = 1u << 24;
  if (!(d & BF16) || !(d & TILES)) return false;
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // of arch_prctl
  static const bool given = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return given;
}

const Kernels& amx_table() {
  static const Kernels table = [] {
    Kernels t = avx512::table;
    t.name = "amx";
    t.gemm = amx::gemm;
    t.gemm_rows = amx::ROWS;
    t.gemm_columns = amx::COLUMNS;
    t.gemm_whole_rows = true;
    t.gemm_depth = amx::DEPTH;
    t.gemm_block_rows = amx::BLOCK_ROWS;
    t.gemm_block_cols = amx::BLOCK_COLUMNS;
    t.gemm_along = amx::ALONG;
    t.gemm_turned = amx::TURNED;
    t.gemm_scratch = amx::scratch;
    t.gemm_pays = amx::pays;
    t.gemm_packed = amx::packed;
    t.gemm_pack = amx::pack;
    t.gemm_otherwise = &avx512::table;
    return t;
  }();
  return table;
}
#endif

const Kernels& avx2_table() {
  static const Kernels table = [] {
    Kernels t = avx2::table;
    t.gemm_steps = avx2_steps::gemm_steps;
    return t;
  }();
  return table;
}

const Kernels& avx512_table() {
  static const Kernels table = [] {
    Kernels t = avx512::table;
    if (__builtin_cpu_supports("avx512vnni")) t.gemm_steps = avx512_vnni::gemm_steps;
    return t;
  }();
  return table;
}

const Kernels& avx512_bf16_table() {
  static const Kernels table = [] {
    Kernels t = avx512_table();
    t.name = "avx512_bf16";
    t.gemm = avx512_bf16::gemm_or_pairs;
    t.gemm_pairs = true;
    return t;
  }();
  return table;
}
#endif

const Kernels* level(const std::string& name) {
  if (name == "portable") return &portable::table;
#if defined(__x86_64__)
  if (name == "avx2" && has_avx2()) return &avx2_table();
  if (name == "avx512" && has_avx512()) return &avx512_table();
#if defined(HAS_TILES)
  if (name == "amx" && has_amx()) return &amx_table();
#endif
  if (name == "avx512_bf16" && has_avx512_bf16()) return &avx512_bf16_table();
#endif
  return nullptr;
}

const Kernels* best() {
  for (const char* name : {"amx", "avx512_bf16", "avx512", "avx2"})
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
  for (const char* name : {"avx2", "avx512", "avx512_bf16", "amx"})
    if (level(name)) found += std::string(",") + name;
  if (__builtin_cpu_supports("avx512vnni")) found += ",vnni";
  if (__builtin_cpu_is("amd")) found += family() >= 26 ? ",amd,zen5" : ",amd";
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
