// Operands of products on AMX: numbers as sums of bfloat16 parts, in tiles, each time anew or once for many products.
#pragma once

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
  void see_bits(uint32_t least_less_one, uint32_t most) {
    small = _mm512_min_epu32(small, _mm512_set1_epi32(static_cast<int>(least_less_one)));
    large = _mm512_max_epu32(large, _mm512_set1_epi32(static_cast<int>(most)));
  }
  uint32_t most() const { return _mm512_reduce_max_epu32(large); }
  uint32_t least_less_one() const { return _mm512_reduce_min_epu32(small); }
  int highest() const { return static_cast<int>(most() >> 23) - 127; }
  int lowest() const { return static_cast<int>(least_less_one() >> 23) - 127; }
};
// Where the lowest are the largest numbers of their rows, `above` says how far these must be above what is lost.
INLINE bool fits(const Range& a, const Range& b, int above = 0) {
  const int low_a = a.lowest(), low_b = b.lowest(), high_a = a.highest(), high_b = b.highest(), least = above - 100;
  return high_a < 120 && high_b < 120 && high_a + high_b < 110 && low_a > least && low_b > least &&
         low_a + low_b > least;
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
  const __m512i bits = nearest ? nearly_rounded(v) : _mm512_castps_si512(v);
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

// What parts of small numbers lose is less than a float32 sum rounds off, where the largest number of their row is as many powers of two
// above it.
constexpr int ABOVE = 22;

// Takes the least over rows of the largest number in each for the least number of all: rows of zeros aside.
template <class T>
static void see_rows(const T* p, int64_t si, int64_t sk, int64_t rows, int64_t depth, Range& range) {
  const bool down = si == 1 && sk != 1;  // lanes are rows
  uint32_t least = ~0u;
  for (int64_t i = 0; i < rows; i += down ? W : 1) {
    __m512i large = _mm512_setzero_si512();
    const int64_t some = tensorlogic::amx::least(rows - i, W);
    for (int64_t k = 0; k < depth; k += down || sk != 1 ? 1 : W) {
      const T* at = p + i * si + k * sk;
      const vf v = down ? read(at, some) : read(at, sk == 1 ? depth - k : 1);
      large = _mm512_max_epu32(large, _mm512_castps_si512(vabs(v)));
    }
    if (!down) large = _mm512_set1_epi32(static_cast<int>(_mm512_reduce_max_epu32(large)));
    const __mmask16 there = _mm512_test_epi32_mask(large, large);
    const uint32_t of = _mm512_mask_reduce_min_epu32(there, large);
    least = of < least ? of : least;
  }
  range.small = _mm512_set1_epi32(static_cast<int>(least - 1));
}

// A square of 32-bit lanes: rows become columns.
INLINE void turn(vf (&r)[SIDE]) {
  vf t[SIDE];
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
}

// The parts of numbers on their way into vector n of a tile of each part: a left tile's is row n of 16 pairs of neighbours along k, a
// right one's is pair n of 16 columns.
template <class T, int P>
struct Into {
  uint16_t* dst;
  Range& range;
  template <class Pairs>
  INLINE_MEMBER void put(int64_t n, vf one, vf other, Pairs pairs) {
    range.see(one);
    range.see(other);
    __m512i a[P], b[P];
    split<P, P == 2 && sizeof(T) == 2>(one, a);
    split<P, P == 2 && sizeof(T) == 2>(other, b);
#pragma GCC unroll 3
    for (int q = 0; q < P; ++q) _mm512_store_si512(dst + q * TILE + n * STEP, pairs(a[q], b[q]));
  }
  INLINE_MEMBER void row(int64_t n, vf low, vf high) { put(n, low, high, along); }
  INLINE_MEMBER void pair(int64_t n, vf first, vf second) { put(n, first, second, across); }
};

// One tile of each part of numbers (i, k) at p[i * si + k * sk], si or sk 1.
template <class T, int P>
INLINE void in_parts(const T* p, int64_t si, int64_t sk, int64_t rows, int64_t depth, bool right, Into<T, P> into) {
  const vf none = set1(0.0f);
  auto row = [&](int64_t i, int64_t k) { return i < rows ? read(p + i * si + k, depth - k) : none; };
  auto column = [&](int64_t k) { return k < depth ? read(p + k * sk, rows) : none; };
  if (sk == 1 && !right) {
    for (int64_t i = 0; i < SIDE; ++i) into.row(i, row(i, 0), row(i, W));
  } else if (sk == 1) {
    for (int64_t k = 0; k < STEP; k += W) {
      vf v[SIDE];
#pragma GCC unroll 16
      for (int64_t i = 0; i < SIDE; ++i) v[i] = row(i, k);
      turn(v);
#pragma GCC unroll 8
      for (int64_t n = 0; n < W; n += 2) into.pair((k + n) / 2, v[n], v[n + 1]);
    }
  } else if (right) {
    for (int64_t k = 0; k < STEP; k += 2) into.pair(k / 2, column(k), column(k + 1));
  } else {
    vf v[2][SIDE];
#pragma GCC unroll 2
    for (int64_t half = 0; half < 2; ++half) {
#pragma GCC unroll 16
      for (int64_t k = 0; k < SIDE; ++k) v[half][k] = column(half * W + k);
      turn(v[half]);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < SIDE; ++i) into.row(i, v[0][i], v[1][i]);
  }
}

// Likewise of bfloat16 numbers as they are.
INLINE void as_they_are(const bf16* p, int64_t si, int64_t sk, int64_t rows, int64_t depth, bool right, uint16_t* dst) {
  const bool by_row = sk == 1;
  auto some = [](int64_t n) { return n >= STEP ? ~0u : (1u << n) - 1; };
  auto halves = [&](int64_t k) {
    const auto mask = static_cast<__mmask16>(k < depth ? some(rows) : 0);
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p + k * sk));
  };
  vf v[SIDE];
  for (int64_t n = 0; n < SIDE; ++n)
    v[n] = _mm512_castsi512_ps(
        by_row ? _mm512_maskz_loadu_epi16(n < rows ? some(depth) : 0u, p + n * si)
               : _mm512_or_si512(halves(2 * n), _mm512_slli_epi32(halves(2 * n + 1), 16)));
  if (by_row == right) turn(v);
#pragma GCC unroll 16
  for (int n = 0; n < SIDE; ++n) _mm512_store_si512(dst + n * STEP, _mm512_castps_si512(v[n]));
}

template <class T, int P, bool RAW>
static void pack_tile(const T* p, int64_t si, int64_t sk, int64_t rows, int64_t depth, bool right, uint16_t* dst,
                      Range& range) {
  T gathered[SIDE * STEP];
  if (sk != 1 && si != 1) {
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t k = 0; k < depth; ++k) gathered[i * STEP + k] = p[i * si + k * sk];
    p = gathered;
    si = STEP;
    sk = 1;
  }
  if constexpr (RAW) {
    as_they_are(p, si, sk, rows, depth, right, dst);
  } else {
    Range own = range;  // in registers
    in_parts<T, P>(p, si, sk, rows, depth, right, {dst, own});
    range = own;
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
  if (sk == 1) {  // along memory, so that each of its pages is visited once; the next ones are asked for
    constexpr int64_t LINE = 64 / sizeof(T);
    for (int64_t i = 0; i < rows; i += SIDE) {
      // for float32, whose parts cost more than its memory, that cost 1 %
      const int64_t more = sizeof(T) > 2 ? 0 : least(rows - i - SIDE, SIDE);
      for (int64_t s = 0; s < steps; ++s) {
        for (int64_t r = 0; r < more; ++r)
          for (int64_t o = 0; o < STEP; o += LINE)
            __builtin_prefetch(p + (i + SIDE + r) * si + s * STEP + o, 0, 2);
        at(i, s);
      }
    }
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

// float16 numbers of a right operand that was laid out once wait whole, half the bytes of their parts: sixteen of
// one row, then sixteen of the next.
template <class B>
constexpr bool WHOLE = std::is_same_v<B, f16>;

static void pack_whole(const f16* p, int64_t si, int64_t sk, int64_t rows, int64_t depth, uint16_t* dst,
                       Range& range) {
  for (int64_t k = 0; k < up(depth, STEP); ++k) {
    for (int64_t i = 0; i < SIDE; ++i)
      dst[k * SIDE + i] = i < rows && k < depth ? p[i * si + k * sk].bits : uint16_t{0};
    range.see(load(reinterpret_cast<const f16*>(dst + k * SIDE), All{}));
  }
}

// The parts of one such tile
INLINE void unfold(const uint16_t* whole, uint16_t* dst) {
  const f16* p = reinterpret_cast<const f16*>(whole);
#pragma GCC unroll 2
  for (int64_t n = 0; n < SIDE; ++n) {
    __m512i a[2], b[2];
    split<2, true>(load(p + 2 * n * SIDE, All{}), a);
    split<2, true>(load(p + (2 * n + 1) * SIDE, All{}), b);
    for (int q = 0; q < 2; ++q) _mm512_store_si512(dst + q * TILE + n * STEP, across(a[q], b[q]));
  }
}

// A right operand laid out once: for every 16 columns the bounds of its numbers, then panel by panel the tiles
// of all columns.
struct Bounds {
  uint32_t least_less_one, most;
};
INLINE int64_t groups_of(int64_t N) { return up(N, SIDE) / SIDE; }
INLINE int64_t bounds_bytes(int64_t N) { return up(groups_of(N) * sizeof(Bounds), 64); }
INLINE int64_t place(int64_t N, int64_t k, int64_t column, int64_t steps) {  // in tiles of one part
  return groups_of(N) * (k / STEP) + column / SIDE * steps;
}

template <class B>
constexpr int ALL_PARTS = std::is_same_v<B, float> ? 3 : 1;

int64_t packed(DType b, int64_t N, int64_t K) {
  const int64_t tiles = groups_of(N) * (up(K, STEP) / STEP) * TILE * sizeof(uint16_t);
  DISPATCH(b, B, return bounds_bytes(N) + tiles * ALL_PARTS<B>)
  return 0;
}

template <class B>
static bool pack_of(const Matrix& b, int64_t first, int64_t last, int64_t N, int64_t K, char* all) {
  constexpr bool RAW = std::is_same_v<B, bf16>;
  constexpr int P = ALL_PARTS<B>;
  uint16_t* const tiles = reinterpret_cast<uint16_t*>(all + bounds_bytes(N));
  bool good = true;
  Range one;
  one.see(set1(1.0f));
  for (int64_t j = first; j < last; j += SIDE) {
    Range range;
    for (int64_t k = 0; k < K; k += DEPTH) {
      const int64_t depth = least(K - k, DEPTH), steps = up(depth, STEP) / STEP;
      const B* p = static_cast<const B*>(b.data) + k * b.row + j * b.col;
      uint16_t* const to = tiles + place(N, k, j, steps) * P * TILE;
      if constexpr (WHOLE<B>)
        pack_whole(p, b.col, b.row, least(N - j, SIDE), depth, to, range);
      else
        pack_tiles<B, P, RAW>(p, b.col, b.row, least(N - j, SIDE), depth, true, to, range);
      for (int64_t n = 0; RAW && n < steps * TILE; n += STEP) {  // for a left operand that has parts
        const __m512i pairs = _mm512_load_si512(to + n);
        range.see(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)));
        range.see(_mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))));
      }
    }
    if (!RAW && !fits(range, one)) {
      see_rows(static_cast<const B*>(b.data) + j * b.col, b.col, b.row, least(N - j, SIDE), K, range);
      const __m512i by = _mm512_set1_epi32(ABOVE << 23);
      range.small = _mm512_sub_epi32(_mm512_max_epu32(range.small, by), by);
      good &= fits(range, one);
    }
    reinterpret_cast<Bounds*>(all)[j / SIDE] = {range.least_less_one(), range.most()};
  }
  return good;
}

bool pack(const Matrix& b, int64_t first, int64_t last, int64_t N, int64_t K, void* out) {
  bool good = false;
  DISPATCH(b.dtype, B, good = pack_of<B>(b, first, last, N, K, static_cast<char*>(out)))
  return good;
}

}  // namespace tensorlogic::amx
