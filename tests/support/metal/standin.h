// A stand-in for the Metal Shading Language: g++ compiles the shaders that Apple's compiler would, and runs them on the CPU.
//
// Every GPU thread is a fiber. Threads of a group run one after another until each waits: at a threadgroup barrier, or for
// the 32 lanes of its simdgroup. Threadgroup memory remembers who touched it since the last barrier, so that a missing
// barrier, memory nobody wrote, threads that wait at different places and pointers that differ between lanes are errors,
// always and not only when the timing is unlucky. What is not declared here does not compile.
#pragma once

#include "machine.h"

namespace standin {

// what a kernel's attributes ask for
template <class V> V cut(const uint3& v) {
  if constexpr (std::is_same_v<V, uint>) return v.x;
  else if constexpr (std::is_same_v<V, uint2>) return uint2(v.x, v.y);
  else return v;
}
template <class V> V threadgroup_position_in_grid() { return cut<V>(machine.group); }
template <class V> V thread_position_in_threadgroup() { return cut<V>(machine.lane->position); }
template <class V> V threads_per_threadgroup() { return cut<V>(machine.size); }
template <class V> V threadgroups_per_grid() { return cut<V>(machine.grid); }
template <class V> V thread_position_in_grid() {
  const uint3 &g = machine.group, &s = machine.size, &p = machine.lane->position;
  return cut<V>(uint3(g.x * s.x + p.x, g.y * s.y + p.y, g.z * s.z + p.z));
}
template <class V> V thread_index_in_threadgroup() { return machine.lane->index; }
template <class V> V thread_index_in_simdgroup() { return machine.lane->index % WIDTH; }
template <class V> V simdgroup_index_in_threadgroup() { return machine.lane->index / WIDTH; }
template <class V> V simdgroups_per_threadgroup() { return uint(machine.simdgroups.size()); }

// One operation of a simdgroup: every lane gives up to four values, and sees all once all have come.
template <class... F> const float (&gather(const char* name, F... given))[4][WIDTH] {
  Lane& l = *machine.lane;
  Simdgroup& s = machine.simdgroups[l.index / WIDTH];
  uint slot = l.collectives++ % 2, i = 0;
  ((s.values[slot][i++][l.index % WIDTH] = float(given)), ...);
  wait(AT_SIMDGROUP, name);
  return s.values[slot];
}

inline uint present() { return uint(min(long(WIDTH), long(machine.lanes.size()) - machine.lane->index / WIDTH * WIDTH)); }

// All lanes must name the same address and stride.
inline void agree(const void* address, long stride) {
  Lane& l = *machine.lane;
  auto& known = machine.simdgroups[l.index / WIDTH].addresses;
  if (present() != WIDTH) stop("a matrix operation of a simdgroup with fewer than 32 threads");
  if (l.addresses == known.size()) known.push_back({address, stride});
  if (known[l.addresses] != std::make_pair(address, stride)) stop("lanes of a simdgroup name different matrices");
  l.addresses++;
}

}  // namespace standin

namespace metal {

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };

inline void threadgroup_barrier(mem_flags flags, int site = __builtin_LINE()) {
  if (flags == mem_flags::mem_none) standin::stop("a barrier that orders no memory");
  standin::wait(standin::AT_BARRIER, "waits at a threadgroup barrier", site);
}
inline void simdgroup_barrier(mem_flags) {
  standin::wait(standin::AT_SIMDGROUP, "waits at a simdgroup barrier");
  standin::machine.lane->pauses++;
}

inline float simd_sum(float value) {
  auto& all = standin::gather("waits in simd_sum", value);
  float total = 0;
  for (uint i = 0; i < standin::present(); i++) total += all[0][i];
  return total;
}
inline float simd_max(float value) {  // NaN is lost, as fmax loses it
  auto& all = standin::gather("waits in simd_max", value);
  float most = all[0][0];
  for (uint i = 1; i < standin::present(); i++) most = std::fmax(most, all[0][i]);
  return most;
}
inline float simd_min(float value) { return -simd_max(-value); }
inline bool simd_any(bool value) {
  auto& all = standin::gather("waits in simd_any", value);
  for (uint i = 0; i < standin::present(); i++)
    if (all[0][i] != 0) return true;
  return false;
}
float simd_sum(half) = delete;
float simd_max(half) = delete;
float simd_min(half) = delete;

// 8 x 8, two neighbours of a row in each lane; which lane holds which is not part of the language
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "Metal has 8 x 8 matrices");
  T own[2];
};
template <class T, int R, int C> simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  return {{value, value}};
}
template <class T>
void simdgroup_load(simdgroup_matrix<T, 8, 8>& m, const standin::shared<T>* from, ulong stride) {
  standin::agree(from, long(stride));
  uint lane = standin::machine.lane->index % 32;
  for (uint i = 0; i < 2; i++) m.own[i] = from[lane / 4 * stride + lane % 4 * 2 + i];
}
template <class T>
void simdgroup_store(simdgroup_matrix<T, 8, 8> m, standin::shared<T>* to, ulong stride) {
  standin::agree(to, long(stride));
  uint lane = standin::machine.lane->index % 32;
  for (uint i = 0; i < 2; i++) to[lane / 4 * stride + lane % 4 * 2 + i] = m.own[i];
}
template <class A>
void simdgroup_multiply_accumulate(simdgroup_matrix<float, 8, 8>& d, simdgroup_matrix<A, 8, 8> a,
                                   simdgroup_matrix<A, 8, 8> b, simdgroup_matrix<float, 8, 8> c) {
  standin::agree(nullptr, 0);
  auto& all = standin::gather("waits in simdgroup_multiply_accumulate", a.own[0], a.own[1], b.own[0], b.own[1]);
  uint lane = standin::machine.lane->index % 32, row = lane / 4;
  for (uint i = 0; i < 2; i++) {
    uint column = lane % 4 * 2 + i;
    float sum = c.own[i];
    for (uint k = 0; k < 8; k++) sum += all[k % 2][row * 4 + k / 2] * all[2 + column % 2][k * 4 + column / 2];
    d.own[i] = sum;
  }
}

}  // namespace metal
