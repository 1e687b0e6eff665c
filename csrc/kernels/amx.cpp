// Products on AMX, whose tiles multiply bfloat16 at sixteen times the rate of float32. float16 and
// float32 numbers are sums of bfloat16 parts, so they gain too, at their own accuracy.
#define TENSORLOGIC_ISA amx
#include "simd/avx512.h"

namespace tensorlogic {
namespace avx512 {
extern const Kernels table;
}
namespace amx {
using namespace avx512;
}
}  // namespace tensorlogic

#include "kernels/amx.h"

#include <type_traits>

namespace tensorlogic::amx {

constexpr int64_t SIDE = 16;          // rows or columns of a tile
constexpr int64_t STEP = 32;          // of the inner dimension
constexpr int64_t TILE = SIDE * STEP;  // numbers
constexpr int64_t PARTS = 3;          // most that a number is split into

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// Bounds of what was split. Parts must neither overflow nor fall below the normal numbers, which the
// tiles take for zero; infinity and NaN have no parts.
struct Range {
  __m512i small = _mm512_set1_epi32(-1), large = _mm512_setzero_si512();  // of the absolute bits; small - 1
  INLINE_MEMBER void see(vf v) {
    const __m512i bits = _mm512_castps_si512(vabs(v));
    large = _mm512_max_epu32(large, bits);
    small = _mm512_min_epu32(small, _mm512_sub_epi32(bits, _mm512_set1_epi32(1)));
  }
  int highest() const { return static_cast<int>(_mm512_reduce_max_epu32(large) >> 23) - 127; }
  int lowest() const { return static_cast<int>(_mm512_reduce_min_epu32(small) >> 23) - 127; }
};
INLINE bool fits(const Range& a, const Range& b) {
  const int low_a = a.lowest(), low_b = b.lowest(), high_a = a.highest(), high_b = b.highest();
  return high_a < 120 && high_b < 120 && high_a + high_b < 110 && low_a > -100 && low_b > -100 &&
         low_a + low_b > -100;
}

// 16 pairs of bfloat16, neighbours of the inner dimension: both from one vector pair that continues, or
// one from each.
INLINE __m512i along(__m512i low, __m512i high) {  // upper halves of 32 lanes in order
  alignas(64) static const uint16_t upper[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(low, _mm512_load_si512(upper), high);
}
INLINE __m512i across(__m512i first, __m512i second) {
  return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(first, 16), second);
}
INLINE __m512i upper_half(vf v, bool nearest) {
  const __m512i bits = nearest ? rounded(v) : _mm512_castps_si512(v);
  return _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
}

// v in P bfloat16 parts, largest first. The parts of a float16 are exact when cut, and so is a third.
template <int P, bool EXACT>
INLINE void split(vf v, __m512i (&parts)[P]) {
#pragma GCC unroll 3
  for (int i = 0; i < P; ++i) {
    parts[i] = upper_half(v, !EXACT && i < 2);
    if (i + 1 < P) v = v - _mm512_castsi512_ps(parts[i]);
  }
}

// The first n of W numbers, the others 0; bfloat16 multiplied as it is keeps its bits, whatever they mean.
template <class T>
INLINE vf read(const T* p, int64_t n) {
  return n >= W ? load(p, All{}) : n > 0 ? load(p, Some{n}) : set1(0.0f);
}

// A tile's worth of an operand: number (i, k) at p[i * si + k * sk]. Vector n of part q, `to[q][n]`, is row
// i = n of 16 pairs where neighbours along k lie side by side, else pair n of 16 rows.
template <class T, int P, bool RAW>
INLINE void pairs_along_k(const T* p, int64_t si, int64_t rows, int64_t depth, __m512i (&to)[P][SIDE],
                          Range& range) {
  for (int64_t i = 0; i < SIDE; ++i) {
    if (i >= rows) {
      for (int q = 0; q < P; ++q) to[q][i] = _mm512_setzero_si512();
      continue;
    }
    const T* at = p + i * si;
    if constexpr (RAW) {
      const __mmask32 mask = depth >= STEP ? ~0u : (1u << depth) - 1;
      to[0][i] = _mm512_maskz_loadu_epi16(mask, at);
    } else {
      const vf low = read(at, depth), high = read(at + W, depth - W);
      range.see(low);
      range.see(high);
      __m512i a[P], b[P];
      split<P, P == 2 && sizeof(T) == 2>(low, a);
      split<P, P == 2 && sizeof(T) == 2>(high, b);
#pragma GCC unroll 3
      for (int q = 0; q < P; ++q) to[q][i] = along(a[q], b[q]);
    }
  }
}

template <class T, int P, bool RAW>
INLINE void pairs_across(const T* p, int64_t sk, int64_t rows, int64_t depth, __m512i (&to)[P][SIDE],
                         Range& range) {
  for (int64_t n = 0; n < SIDE; ++n) {
    const T* at = p + 2 * n * sk;
    const int64_t one = 2 * n < depth ? rows : 0, two = 2 * n + 1 < depth ? rows : 0;
    if constexpr (RAW) {
      auto halves = [](const T* from, int64_t some) {
        const __mmask16 mask = static_cast<__mmask16>((1u << some) - 1);
        return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from));
      };
      to[0][n] = _mm512_or_si512(halves(at, one), _mm512_slli_epi32(halves(at + sk, two), 16));
    } else {
      const vf first = read(at, one), second = read(at + sk, two);
      range.see(first);
      range.see(second);
      __m512i a[P], b[P];
      split<P, P == 2 && sizeof(T) == 2>(first, a);
      split<P, P == 2 && sizeof(T) == 2>(second, b);
#pragma GCC unroll 3
      for (int q = 0; q < P; ++q) to[q][n] = across(a[q], b[q]);
    }
  }
}

INLINE void turn(__m512i (&v)[SIDE]) {
  vf r[SIDE], t[SIDE];
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; ++i) r[i] = _mm512_castsi512_ps(v[i]);
#pragma GCC unroll 4
  for (int round = 0; round < 4; ++round) {
#pragma GCC unroll 8
    for (int i = 0; i < SIDE / 2; ++i) {
      t[2 * i] = interleave_low(r[i], r[i + SIDE / 2]);
      t[2 * i + 1] = interleave_high(r[i], r[i + SIDE / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; ++i) r[i] = t[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; ++i) v[i] = _mm512_castps_si512(r[i]);
}

// One tile of each part: a left tile has a vector of pairs per row, a right one a vector of columns per pair.
template <class T, int P, bool RAW>
static void pack_tile(const T* p, int64_t si, int64_t sk, int64_t rows, int64_t depth, bool right,
                      uint16_t* dst, Range& range) {
  __m512i v[P][SIDE];
  T gathered[SIDE * STEP];
  if (sk != 1 && si != 1) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < depth; ++k) gathered[i * STEP + k] = p[i * si + k * sk];
    p = gathered;
    si = STEP;
    sk = 1;
  }
  const bool by_row = sk == 1;
  if (by_row)
    pairs_along_k<T, P, RAW>(p, si, rows, depth, v, range);
  else
    pairs_across<T, P, RAW>(p, sk, rows, depth, v, range);
#pragma GCC unroll 3
  for (int q = 0; q < P; ++q) {
    if (by_row == right) turn(v[q]);
#pragma GCC unroll 16
    for (int n = 0; n < SIDE; ++n) _mm512_store_si512(dst + q * TILE + n * STEP, v[q][n]);
  }
}

// Tiles of SIDE rows each, side by side: [rows / SIDE][steps][P] tiles
template <class T, int P, bool RAW>
static void pack_tiles(const T* p, int64_t si, int64_t sk, int64_t rows, int64_t depth, bool right,
                       uint16_t* dst, Range& range) {
  const int64_t steps = (depth + STEP - 1) / STEP;
  auto at = [&](int64_t i, int64_t s) {
    pack_tile<T, P, RAW>(p + i * si + s * STEP * sk, si, sk, least(rows - i, SIDE),
                         least(depth - s * STEP, STEP), right, dst + (i / SIDE * steps + s) * P * TILE,
                         range);
  };
  if (sk == 1) {  // along memory, so that each of its pages is visited once
    for (int64_t i = 0; i < rows; i += SIDE)
      for (int64_t s = 0; s < steps; ++s) at(i, s);
  } else {
    for (int64_t s = 0; s < steps; ++s)
      for (int64_t i = 0; i < rows; i += SIDE) at(i, s);
  }
}

// How many parts are made of an operand of which `most` are asked for: two are all of a float16.
template <class T>
constexpr int parts_of(int most) {
  return std::is_same_v<T, bf16> ? 1 : std::is_same_v<T, f16> && most > 2 ? 2 : most;
}

// Of products of parts, those as small as what was cut off a float32 are left out: part i of one by j of the
// other where i + j reaches this limit. Of two halves nothing was cut off.
template <class A, class B>
constexpr int limit_of(int most) {
  return sizeof(A) > 2 || sizeof(B) > 2 ? most : 2 * PARTS;
}

// c[0 .. 16 R)[0 .. 16 C) (+)= left · right
template <int PA, int PB, int LIMIT, int R, int C>
static void tile(const uint16_t* a, const uint16_t* b, int64_t steps, float* c, int64_t pitch, bool add) {
  const uint16_t *a1 = a + steps * PA * TILE, *b1 = b + steps * PB * TILE;
  constexpr int64_t ROW = STEP * sizeof(uint16_t);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 3
    for (int i = 0; i < PA; ++i) {
      _tile_loadd(4, a + i * TILE, ROW);
      if constexpr (R > 1) _tile_loadd(5, a1 + i * TILE, ROW);
#pragma GCC unroll 3
      for (int j = 0; j < PB; ++j) {
        if (i + j >= LIMIT) continue;
        _tile_loadd(6, b + j * TILE, ROW);
        if constexpr (C > 1) _tile_loadd(7, b1 + j * TILE, ROW);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (C > 1) _tile_dpbf16ps(1, 4, 7);
        if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
        if constexpr (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
      }
    }
    a += PA * TILE, a1 += PA * TILE, b += PB * TILE, b1 += PB * TILE;
  }
  alignas(64) float sums[2 * SIDE][2 * SIDE];
  float* to = add ? sums[0] : c;
  const int64_t step = add ? 2 * SIDE : pitch;
  _tile_stored(0, to, step * sizeof(float));
  if constexpr (C > 1) _tile_stored(1, to + SIDE, step * sizeof(float));
  if constexpr (R > 1) _tile_stored(2, to + SIDE * step, step * sizeof(float));
  if constexpr (R > 1 && C > 1) _tile_stored(3, to + SIDE * step + SIDE, step * sizeof(float));
  if (!add) return;
  for (int r = 0; r < R * SIDE; ++r)
#pragma GCC unroll 2
    for (int n = 0; n < C * SIDE; n += W)
      store(c + r * pitch + n, load(c + r * pitch + n, All{}) + load(sums[r] + n, All{}), All{});
}

struct alignas(64) Configuration {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// False where the numbers do not split.
template <class A, class B, int MOST>
static bool by_tiles(const GemmCall& g) {
  constexpr int PA = parts_of<A>(MOST), PB = parts_of<B>(MOST), LIMIT = limit_of<A, B>(MOST);
  constexpr bool RAW = std::is_same_v<A, bf16> && std::is_same_v<B, bf16>;  // nothing to split
  const int64_t widest = least(up(g.K, STEP), up(g.depth, STEP));
  const int64_t next = g.all_rows ? g.pitch : 0;
  uint16_t* const left = reinterpret_cast<uint16_t*>(g.scratch);
  uint16_t* const right = left + 2 * SIDE * widest * PA;
  Range in_a, in_b;
  static const Configuration configuration;
  _tile_loadconfig(&configuration);
  bool good = true;
  for (int64_t k = 0; good && (k == 0 || k < g.K); k += widest) {
    const int64_t depth = least(g.K - k, widest), steps = (depth + STEP - 1) / STEP;
    const B* b = static_cast<const B*>(g.b.data) + k * g.b.row;
    pack_tiles<B, PB, RAW>(b, g.b.col, g.b.row, g.N, depth, true, right, in_b);
    for (int64_t i = 0; i < g.M; i += 2 * SIDE) {
      const int64_t rows = least(g.M - i, 2 * SIDE);
      const A* a = static_cast<const A*>(g.a.data) + i * g.a.row + k * g.a.col;
      pack_tiles<A, PA, RAW>(a, g.a.row, g.a.col, rows, depth, false, left, in_a);
      if constexpr (!RAW)
        if (!fits(in_a, in_b)) {
          good = false;
          break;
        }
      float* const c_rows = g.c + i * next;
      for (int64_t j = 0; j < g.N; j += 2 * SIDE) {
        const uint16_t* columns = right + j / SIDE * steps * PB * TILE;
        float* c = c_rows + j;
        const bool add = k > 0, wide = g.N - j > SIDE;
        if (rows > SIDE)
          (wide ? tile<PA, PB, LIMIT, 2, 2> : tile<PA, PB, LIMIT, 2, 1>)(left, columns, steps, c, g.pitch, add);
        else
          (wide ? tile<PA, PB, LIMIT, 1, 2> : tile<PA, PB, LIMIT, 1, 1>)(left, columns, steps, c, g.pitch, add);
      }
      if (k + depth >= g.K) g.done(g.context, c_rows, i, rows);
    }
  }
  _tile_release();
  return good;
}

bool pays(DType a, DType b, int parts, int64_t M, int64_t N, int64_t K) {
  const int64_t work = M * N * K;
  if (a == DType::bf16 && b == DType::bf16) return work >= 1 << 19;
  if (parts > 2 && a != DType::f16 && b != DType::f16)
    return M >= 48 && N >= 48 && K >= 48 && work >= 1 << 22;
  return M >= 14 && work >= 1 << 20;
}

template <class A, class B>
static bool in_parts(const GemmCall& g) {
  constexpr auto size = sizeof(A) + sizeof(B);
  if constexpr (size == sizeof(f16) + sizeof(double)) {
    return false;  // too rare to be worth its code
  } else if constexpr (size > 2 * sizeof(f16)) {
    if (g.parts == 1) return by_tiles<A, B, 1>(g);
    if (g.parts == 2) return by_tiles<A, B, 2>(g);
    return by_tiles<A, B, 3>(g);
  } else {
    return by_tiles<A, B, 2>(g);
  }
}

void gemm(const GemmCall& g) {
  bool done = false;
  DISPATCH_WIDE(g.a.dtype, A, DISPATCH_WIDE(g.b.dtype, T, done = in_parts<A, T>(g)))
  if (done) return;
  GemmCall plain = g;
  plain.depth = least(g.depth, avx512::table.gemm_depth);
  avx512::table.gemm(plain);
}

int64_t scratch(int64_t N, int64_t depth) {
  const int64_t most = (2 * SIDE + up(N, 2 * SIDE)) * up(depth, STEP) * PARTS / 2;
  const int64_t plain = avx512::table.gemm_scratch(N, least(depth, avx512::table.gemm_depth));
  return most > plain ? most : plain;
}

}  // namespace tensorlogic::amx
