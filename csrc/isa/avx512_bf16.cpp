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

#include "kernels/row_walk.h"
#include "kernels/gemm.h"

namespace tensorlogic::avx512_bf16 {

// Units are two neighbours, the first in the lower half. `along`: pairs that lie side by side; `beside`: of elements of
// two lines. What is wider than bfloat16 is rounded on the way.
INLINE vf along(const bf16* p, All) { return _mm512_loadu_ps(p); }
INLINE vf along(const bf16* p, Some s) { return _mm512_maskz_loadu_ps(s.mask(), p); }
INLINE __m256i halves(const bf16* p, All) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
INLINE __m256i halves(const bf16* p, Some s) { return _mm256_maskz_loadu_epi16(s.mask(), p); }
template <class Lanes>
INLINE vf beside(const bf16* low, const bf16* high, Lanes lanes) {
  return _mm512_castsi512_ps(
      _mm512_or_si512(_mm512_cvtepu16_epi32(halves(low, lanes)),
                      _mm512_slli_epi32(_mm512_cvtepu16_epi32(halves(high, lanes)), 16)));
}

INLINE __m512i rounded(vf low, vf high) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)); }
template <class T, class Lanes>
INLINE vf some(const T* p, Lanes lanes) {
  return keep(load(p, lanes), set1(0.0f), lanes);
}
template <class T>
INLINE vf along(const T* p, All lanes) {
  return _mm512_castsi512_ps(rounded(load(p, lanes), load(p + W, lanes)));
}
template <class T>
INLINE vf along(const T* p, Some s) {
  const int64_t n = 2 * s.n;
  if (n < W) return _mm512_castsi512_ps(rounded(some(p, Some{n}), set1(0.0f)));
  if (n == W) return _mm512_castsi512_ps(rounded(load(p, All{}), set1(0.0f)));
  return _mm512_castsi512_ps(rounded(load(p, All{}), some(p + W, Some{n - W})));
}
template <class T, class Lanes>
INLINE vf beside(const T* low, const T* high, Lanes lanes) {
  alignas(64) static constexpr uint16_t turns[2 * W] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  const __m512i pairs = rounded(some(low, lanes), some(high, lanes));
  return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(turns), pairs));
}
template <class T>
INLINE float unit_of(const T* low, const T* high) {
  return beside(low, high, Some{1})[0];
}
template <class T>
INLINE float last_unit(const T* p) {  // without a partner: paired with zero
  T both[W] = {*p};
  return along(both, Some{1})[0];
}

// Unit (i, j) is elements (i, 2j) and (i, 2j + 1).
template <class T>
struct PairsAcross {
  const T* p;
  int64_t si, sj;
  bool across() const { return sj == 1; }
  bool down() const { return si == 1; }
  const T* at(int64_t i, int64_t j) const { return p + i * si + 2 * j * sj; }
  template <class Lanes>
  INLINE_MEMBER vf along_row(int64_t i, int64_t j, Lanes lanes) const {
    return along(at(i, j), lanes);
  }
  template <class Lanes>
  INLINE_MEMBER vf along_column(int64_t i, int64_t j, Lanes lanes) const {
    return beside(at(i, j), at(i, j) + sj, lanes);
  }
  INLINE_MEMBER float unit(int64_t i, int64_t j) const { return unit_of(at(i, j), at(i, j) + sj); }
};

// Unit (i, j) is elements (2i, j) and (2i + 1, j).
template <class T>
struct PairsDown {
  const T* p;
  int64_t si, sj;
  bool across() const { return sj == 1; }
  bool down() const { return si == 1; }
  const T* at(int64_t i, int64_t j) const { return p + 2 * i * si + j * sj; }
  template <class Lanes>
  INLINE_MEMBER vf along_row(int64_t i, int64_t j, Lanes lanes) const {
    return beside(at(i, j), at(i, j) + si, lanes);
  }
  template <class Lanes>
  INLINE_MEMBER vf along_column(int64_t i, int64_t j, Lanes lanes) const {
    return along(at(i, j), lanes);
  }
  INLINE_MEMBER float unit(int64_t i, int64_t j) const { return unit_of(at(i, j), at(i, j) + si); }
};

struct ByPairs {
  static constexpr int64_t elements = 2;
  INLINE_MEMBER static vf accumulate(vf left, vf right, vf acc) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(left), reinterpret_cast<__m512bh>(right));
  }
  INLINE_MEMBER static void pack_left(const Matrix& m, int64_t i, int64_t k, int64_t rows,
                                      int64_t depth, int64_t each, float* dst) {
    DISPATCH_WIDE(m.dtype, T, pack_left_of<T>(m, i, k, rows, depth, each, dst))
  }
  INLINE_MEMBER static void pack_right(const Matrix& m, int64_t k, int64_t j, int64_t depth,
                                       int64_t cols, float* dst) {
    DISPATCH_WIDE(m.dtype, T, pack_right_of<T>(m, k, j, depth, cols, dst))
  }

 private:
  template <class T>
  static void pack_left_of(const Matrix& m, int64_t i, int64_t k, int64_t rows, int64_t depth, int64_t each,
                           float* dst) {
    const T* p = static_cast<const T*>(m.data) + i * m.row + k * m.col;
    const int64_t whole = depth / 2;
    pack_panels(PairsAcross<T>{p, m.row, m.col}, rows, whole, each, dst);
    if (depth % 2)
      for (int64_t r = 0; r < rows; ++r)
        dst[(r / each * MR + r % each) * PITCH + whole] = last_unit(p + r * m.row + (depth - 1) * m.col);
  }
  template <class T>
  static void pack_right_of(const Matrix& m, int64_t k, int64_t j, int64_t depth, int64_t cols, float* dst) {
    const T* p = static_cast<const T*>(m.data) + k * m.row + j * m.col;
    const int64_t whole = depth / 2;
    pack_panel(PairsDown<T>{p, m.row, m.col}, whole, cols, dst, NR);
    if (depth % 2)
      for (int64_t n = 0; n < NR; ++n)
        dst[whole * NR + n] = n < cols ? last_unit(p + (depth - 1) * m.row + n * m.col) : 0.0f;
  }
};

void gemm_or_pairs(const GemmCall& g) {
  if (g.parts == 1 || (g.a.dtype == DType::bf16 && g.b.dtype == DType::bf16))
    gemm_by<ByPairs>(g);
  else
    avx512::table.gemm(g);
}

}  // namespace tensorlogic::avx512_bf16
