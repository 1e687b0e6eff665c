// What AVX-512 gains from dot products of 16-bit pairs: products of steps at twice the rate of float32.
#define TENSORLOGIC_ISA avx512_vnni
#include "simd/avx512.h"

namespace tensorlogic {
namespace avx512_vnni {
using namespace avx512;
}
}  // namespace tensorlogic

#include "kernels/row_walk.h"
#include "kernels/fixed_point.h"

namespace tensorlogic::avx512_vnni {

struct Pairs {
  INLINE_MEMBER static vf of(vf low, vf high) {
    const __m512i lower = _mm512_and_si512(_mm512_cvtps_epi32(low), _mm512_set1_epi32(0xffff));
    return _mm512_castsi512_ps(_mm512_or_si512(lower, _mm512_slli_epi32(_mm512_cvtps_epi32(high), 16)));
  }
  INLINE_MEMBER static vf along(vf first, vf second) {
    const __m256i low = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(first)),
                  high = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(second));
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  }
  using Sums = __m512i;
  INLINE_MEMBER static Sums none() { return _mm512_setzero_si512(); }
  INLINE_MEMBER static Sums read(const float* p) { return _mm512_loadu_si512(p); }
  INLINE_MEMBER static Sums repeat(const float* p) { return _mm512_castps_si512(set1(*p)); }
  INLINE_MEMBER static Sums accumulate(Sums left, Sums right, Sums acc) {
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(left), "v"(right));  // GCC 12 copies what its intrinsic adds to
    return acc;
  }
  INLINE_MEMBER static vf real(Sums acc) { return _mm512_cvtepi32_ps(acc); }
};

void gemm_steps(const GemmCall& g) { gemm_by_steps<Pairs>(g); }

}  // namespace tensorlogic::avx512_vnni
