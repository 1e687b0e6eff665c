// Products of steps by AVX2's multiplication of 16-bit pairs: 1.5 times the rate of float32.
#define TENSORLOGIC_ISA avx2_steps
#include "simd/avx2.h"

namespace tensorlogic {
namespace avx2_steps {
using namespace avx2;
}
}  // namespace tensorlogic

#include "kernels/row_walk.h"
#include "kernels/fixed_point.h"

namespace tensorlogic::avx2_steps {

struct Pairs {
  INLINE_MEMBER static vf of(vf low, vf high) {
    const __m256i lower = _mm256_and_si256(_mm256_cvtps_epi32(low), _mm256_set1_epi32(0xffff));
    return _mm256_castsi256_ps(_mm256_or_si256(lower, _mm256_slli_epi32(_mm256_cvtps_epi32(high), 16)));
  }
  INLINE_MEMBER static vf along(vf first, vf second) {
    const __m256i both = _mm256_packs_epi32(_mm256_cvtps_epi32(first), _mm256_cvtps_epi32(second));
    return _mm256_castsi256_ps(_mm256_permute4x64_epi64(both, 0xd8));
  }
  using Sums = __m256i;
  INLINE_MEMBER static Sums none() { return _mm256_setzero_si256(); }
  INLINE_MEMBER static Sums read(const float* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  INLINE_MEMBER static Sums repeat(const float* p) { return _mm256_castps_si256(set1(*p)); }
  INLINE_MEMBER static Sums accumulate(Sums left, Sums right, Sums acc) {
    __m256i products;  // GCC 12 keeps what it adds to in memory
    asm("vpmaddwd %2, %3, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(products) : "x"(left), "x"(right));
    return acc;
  }
  INLINE_MEMBER static vf real(Sums acc) { return _mm256_cvtepi32_ps(acc); }
};

void gemm_steps(const GemmCall& g) { gemm_by_steps<Pairs>(g); }

}  // namespace tensorlogic::avx2_steps
