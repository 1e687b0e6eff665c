// Dropout by the counter-based generator Philox 4x32-7: any element's decision from seed, offset
// and its index alone.
#pragma once

namespace tensorlogic::TENSORLOGIC_ISA {

// The first word of Philox 4x32-7 with key `seed` at counter (index, offset), as uniform numbers in
// [0, 1). The same numbers as the package's other dropout kernels and its reference draw (Salmon et
// al., SC 2011).
INLINE vf uniform(uint64_t seed, uint64_t offset, vu low, vu high) {
  vu none = low - low, c0 = low, c1 = high;
  vu c2 = none + static_cast<uint32_t>(offset), c3 = none + static_cast<uint32_t>(offset >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
#pragma GCC unroll 7
  for (int round = 0; round < 7; ++round) {
    vu high_a, low_a, high_b, low_b;
    multiply(0xD2511F53u, c0, high_a, low_a);
    multiply(0xCD9E8D57u, c2, high_b, low_b);
    c0 = high_b ^ c1 ^ k0;
    c2 = high_a ^ c3 ^ k1;
    c1 = low_b;
    c3 = low_a;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  vi x = reinterpret_cast<vi>(c0);
  x = x < 0 ? ~x : x;
  return __builtin_convertvector(x, vf) * set1(4.6566127342e-10f);
}

template <class T>
struct Dropout {
  static constexpr int outputs = 1;
  static constexpr bool ties_even = true, apart = false;
  static constexpr Activation last = Activation::none;
  Source<T> x;
  uint64_t seed, offset, begin;
  float p, scale;
  template <class Lanes>
  INLINE_MEMBER Pair at(int64_t i, Lanes lanes) const {
    uint64_t first = begin + static_cast<uint64_t>(i);
    vu lane = reinterpret_cast<vu>(lane_numbers()), none = lane - lane;
    vu low = lane + static_cast<uint32_t>(first), high = none + static_cast<uint32_t>(first >> 32);
    high = low < lane ? high + 1 : high;  // the low word went round
    vf u = uniform(seed, offset, low, high);
    vf v = u >= set1(p) ? x.at(i, lanes) * set1(scale) : set1(0.0f);
    return {v, v};
  }
  template <int64_t N>
  INLINE_MEMBER void ahead(int64_t i) const {
    x.template ahead<N>(i);
  }
};

static void dropout(const DropoutCall& call, int64_t begin, int64_t end) {
  DISPATCH(call.dtype, T, {
    T* y = static_cast<T*>(call.y);
    const T* x = static_cast<const T*>(call.x);
    Dropout<T> e{{x + begin, -1}, call.seed, call.offset, static_cast<uint64_t>(begin),
                 call.p,          call.scale};
    emit(e, y + begin, y + begin, end - begin, false, end - begin);
  })
}

}  // namespace tensorlogic::TENSORLOGIC_ISA
