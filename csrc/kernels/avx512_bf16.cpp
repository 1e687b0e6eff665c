// What AVX-512 gains from dot products of bfloat16 pairs: products at twice the rate of float32.
#define TENSORLOGIC_ISA avx512_bf16
#include "simd/avx512.h"

namespace tensorlogic {
namespace avx512 {
extern const Kernels table;
}
namespace avx512_bf16 {
using namespace avx512;
}
}  // namespace tensorlogic

#include "kernels/lanes.h"
#include "kernels/gemm.h"

namespace tensorlogic::avx512_bf16 {

INLINE vf interleave(__m256i low, __m256i high) {  // pairs, `low` in the lower halves
  return _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16)));
}
INLINE __m256i halves(const bf16* p, All) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
INLINE __m256i halves(const bf16* p, Some s) { return _mm256_maskz_loadu_epi16(s.mask(), p); }
INLINE vf pairs(const bf16* p, All) { return _mm512_loadu_ps(p); }
INLINE vf pairs(const bf16* p, Some s) { return _mm512_maskz_loadu_ps(s.mask(), p); }
INLINE float pair(bf16 low, bf16 high) {
  const uint32_t bits = low.bits | static_cast<uint32_t>(high.bits) << 16;
  float unit;
  __builtin_memcpy(&unit, &bits, sizeof(unit));
  return unit;
}

// Units are two neighbours along j: unit (i, j) is elements (i, 2j) and (i, 2j + 1).
struct PairsAcross {
  const bf16* p;
  int64_t si, sj;
  bool across() const { return sj == 1; }
  bool down() const { return si == 1; }
  const bf16* at(int64_t i, int64_t j) const { return p + i * si + 2 * j * sj; }
  template <class Lanes>
  INLINE_MEMBER vf along_row(int64_t i, int64_t j, Lanes lanes) const {
    return pairs(at(i, j), lanes);
  }
  template <class Lanes>
  INLINE_MEMBER vf along_column(int64_t i, int64_t j, Lanes lanes) const {
    return interleave(halves(at(i, j), lanes), halves(at(i, j) + sj, lanes));
  }
  INLINE_MEMBER float unit(int64_t i, int64_t j) const { return pair(*at(i, j), at(i, j)[sj]); }
};

// Units are two neighbours along i.
struct PairsDown {
  const bf16* p;
  int64_t si, sj;
  bool across() const { return sj == 1; }
  bool down() const { return si == 1; }
  const bf16* at(int64_t i, int64_t j) const { return p + 2 * i * si + j * sj; }
  template <class Lanes>
  INLINE_MEMBER vf along_row(int64_t i, int64_t j, Lanes lanes) const {
    return interleave(halves(at(i, j), lanes), halves(at(i, j) + si, lanes));
  }
  template <class Lanes>
  INLINE_MEMBER vf along_column(int64_t i, int64_t j, Lanes lanes) const {
    return pairs(at(i, j), lanes);
  }
  INLINE_MEMBER float unit(int64_t i, int64_t j) const { return pair(*at(i, j), at(i, j)[si]); }
};

// A last element without a partner is paired with zero.
struct ByPairs {
  static constexpr int64_t elements = 2;
  INLINE_MEMBER static vf accumulate(vf left, vf right, vf acc) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
  }
  INLINE_MEMBER static void pack_left(const Matrix& m, int64_t i, int64_t k, int64_t rows,
                                      int64_t depth, int64_t each, float* dst) {
    const bf16* p = static_cast<const bf16*>(m.data) + i * m.row + k * m.col;
    const int64_t whole = depth / 2;
    pack_panels(PairsAcross{p, m.row, m.col}, rows, whole, each, dst);
    if (depth % 2)
      for (int64_t r = 0; r < rows; ++r)
        dst[(r / each * MR + r % each) * PITCH + whole] = pair(p[r * m.row + (depth - 1) * m.col], bf16{0});
  }
  INLINE_MEMBER static void pack_right(const Matrix& m, int64_t k, int64_t j, int64_t depth,
                                       int64_t cols, float* dst) {
    const bf16* p = static_cast<const bf16*>(m.data) + k * m.row + j * m.col;
    const int64_t whole = depth / 2;
    pack_panel(PairsDown{p, m.row, m.col}, whole, cols, dst, NR);
    if (depth % 2)
      for (int64_t n = 0; n < NR; ++n)
        dst[whole * NR + n] =
            n < cols ? pair(p[(depth - 1) * m.row + n * m.col], bf16{0}) : 0.0f;
  }
};

void gemm_or_pairs(const GemmCall& g) {
  if (g.a.dtype == DType::bf16 && g.b.dtype == DType::bf16)
    gemm_by<ByPairs>(g);
  else
    avx512::table.gemm(g);
}

}  // namespace tensorlogic::avx512_bf16
