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

#include "isa/amx.h"
#include "isa/amx_pack.h"

namespace tensorlogic::amx {

// Of products of parts, those as small as what was cut off a float32 are left out: part i of one by j of the
// other where i + j reaches this limit. Of two halves nothing was cut off.
template <class A, class B>
constexpr int limit_of(int most) {
  return sizeof(A) > 2 || sizeof(B) > 2 ? most : 2 * PARTS;
}

// What a product does for the next tiles meanwhile: each step asks memory for some, and unfolds some.
struct Meanwhile {
  const uint16_t *soon, *whole;  // either may be null
  uint16_t* unfolded;
  int64_t bytes;  // asked for a step
  bool wide;
  INLINE_MEMBER void at(int64_t s, int64_t steps) const {
    if (soon)
      for (int64_t o = s * bytes; o < (s + 1) * bytes; o += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(soon) + o, 0, 2);
    if (!whole) return;
    unfold(whole + s * TILE, unfolded + 2 * s * TILE);
    if (wide) unfold(whole + (steps + s) * TILE, unfolded + 2 * (steps + s) * TILE);
  }
  void all(int64_t steps) const {
    for (int64_t s = 0; s < steps; ++s) at(s, steps);
  }
};

constexpr int64_t ROW = STEP * sizeof(uint16_t);

// Without a multiply-add of vectors for some 0.6 us, the next tile that is stored waits 250 ns: one a step avoids that.
INLINE void stay_awake() {
  vf zero = set1(0.0f);
  asm volatile("vfmadd231ps %0, %0, %0" : "+v"(zero));
}

// One step of 32 rows, or of 16 without parts: every tile of sums waits for its last product.
template <int PA, int PB, int LIMIT, int R, int C>
INLINE void step_of(const uint16_t* a, const uint16_t* a1, const uint16_t* b, const uint16_t* b1) {
#pragma GCC unroll 3
  for (int j = 0; j < PB; ++j) {
    _tile_loadd(6, b + j * TILE, ROW);
    if constexpr (C > 1) _tile_loadd(7, b1 + j * TILE, ROW);
#pragma GCC unroll 3
    for (int i = 0; i < PA; ++i) {
      if (i + j >= LIMIT) continue;
      _tile_loadd(4, a + i * TILE, ROW);
      if constexpr (R > 1) _tile_loadd(5, a1 + i * TILE, ROW);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (C > 1) _tile_dpbf16ps(1, 4, 7);
      if constexpr (R > 1) _tile_dpbf16ps(2, 5, 6);
      if constexpr (R > 1 && C > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// One step of 16 rows: two tiles of sums for the same numbers, by parts of the left operand, so that fewer
// products wait for each other, and every tile is loaded once.
template <int PA, int PB, int LIMIT, int C>
INLINE void short_step_of(const uint16_t* a, const uint16_t* b, const uint16_t* b1) {
  _tile_loadd(4, a, ROW);
  _tile_loadd(5, a + TILE, ROW);
  if constexpr (PA > 2) _tile_loadd(6, a + 2 * TILE, ROW);
#pragma GCC unroll 3
  for (int j = 0; j < PB; ++j) {
    _tile_loadd(7, b + j * TILE, ROW);
    _tile_dpbf16ps(0, 4, 7);
    if (1 + j < LIMIT) _tile_dpbf16ps(2, 5, 7);
    if constexpr (PA > 2)
      if (2 + j < LIMIT) _tile_dpbf16ps(0, 6, 7);
    if constexpr (C > 1) {
      _tile_loadd(7, b1 + j * TILE, ROW);
      _tile_dpbf16ps(1, 4, 7);
      if (1 + j < LIMIT) _tile_dpbf16ps(3, 5, 7);
      if constexpr (PA > 2)
        if (2 + j < LIMIT) _tile_dpbf16ps(1, 6, 7);
    }
  }
}

// c[0 .. 16 R)[0 .. 16 C) (+)= left · right; SHORT: of a product without more rows
template <int PA, int PB, int LIMIT, int R, int C, bool SHORT = false>
static void tile(const uint16_t* a, const uint16_t* b, int64_t steps, float* c, int64_t pitch, bool add,
                 const Meanwhile& meanwhile) {
  constexpr bool TWICE = SHORT && PA > 1;
  const uint16_t *a1 = a + steps * PA * TILE, *b1 = b + steps * PB * TILE;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < steps; ++s) {
    meanwhile.at(s, steps);
    stay_awake();
    if constexpr (TWICE)
      short_step_of<PA, PB, LIMIT, C>(a, b, b1);
    else
      step_of<PA, PB, LIMIT, R, C>(a, a1, b, b1);
    a += PA * TILE, a1 += PA * TILE, b += PB * TILE, b1 += PB * TILE;
  }
  alignas(64) float sums[2 * SIDE][2 * SIDE];
  const bool direct = !add && !TWICE;
  float* to = direct ? c : sums[0];
  const int64_t step = direct ? pitch : 2 * SIDE;
  _tile_stored(0, to, step * sizeof(float));
  if constexpr (C > 1) _tile_stored(1, to + SIDE, step * sizeof(float));
  if constexpr (R > 1 || TWICE) _tile_stored(2, to + SIDE * step, step * sizeof(float));
  if constexpr ((R > 1 || TWICE) && C > 1) _tile_stored(3, to + SIDE * step + SIDE, step * sizeof(float));
  if (direct) return;
  for (int r = 0; r < R * SIDE; ++r)
#pragma GCC unroll 2
    for (int n = 0; n < C * SIDE; n += W) {
      vf v = load(sums[r] + n, All{});
      if constexpr (TWICE) v = v + load(sums[r + SIDE] + n, All{});
      store(c + r * pitch + n, add ? load(c + r * pitch + n, All{}) + v : v, All{});
    }
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
  constexpr int HELD = WHOLE<B> ? 1 : PB;  // tiles of a packed operand for one of numbers
  const int64_t widest = least(up(g.K, STEP), up(g.depth, STEP));
  const int64_t next = g.all_rows ? g.pitch : 0;
  uint16_t* const left = reinterpret_cast<uint16_t*>(g.scratch);
  uint16_t* const right = left + 2 * SIDE * widest * PA;
  Range in_b;
  static const Configuration configuration;
  _tile_loadconfig(&configuration);
  bool good = true;
  for (int64_t k = 0; good && (k == 0 || k < g.K); k += widest) {
    const int64_t depth = least(g.K - k, widest), steps = (depth + STEP - 1) / STEP;
    const uint16_t *ready = nullptr, *next_panel = nullptr;
    const B* b = static_cast<const B*>(g.b.data) + k * g.b.row;
    bool columns_seen = g.tiles;  // when it was laid out
    int above = 0;
    if (g.tiles) {
      const char* all = static_cast<const char*>(g.tiles);
      const Bounds* bounds = reinterpret_cast<const Bounds*>(all) + g.first / SIDE;
      for (int64_t n = 0; k == 0 && n < groups_of(g.N); ++n) in_b.see_bits(bounds[n].least_less_one, bounds[n].most);
      ready = reinterpret_cast<const uint16_t*>(all + bounds_bytes(g.tiles_N)) +
              place(g.tiles_N, k, g.first, steps) * HELD * TILE;
      if (k + depth < g.K) next_panel = ready + groups_of(g.tiles_N) * steps * HELD * TILE;
    } else {
      in_b = {};
      pack_tiles<B, PB, RAW>(b, g.b.col, g.b.row, g.N, depth, true, right, in_b);
    }
    for (int64_t i = 0; i < g.M; i += 2 * SIDE) {
      const int64_t rows = least(g.M - i, 2 * SIDE);
      const A* a = static_cast<const A*>(g.a.data) + i * g.a.row + k * g.a.col;
      Range in_a;
      pack_tiles<A, PA, RAW>(a, g.a.row, g.a.col, rows, depth, false, left, in_a);
      if constexpr (!RAW) {
        if (!fits(in_a, in_b, above)) {
          see_rows(a, g.a.row, g.a.col, rows, depth, in_a);
          if (!columns_seen && !fits(in_a, in_b, ABOVE)) {
            see_rows(b, g.b.col, g.b.row, g.N, depth, in_b);
            columns_seen = true;
            above = ABOVE;
          }
          if (!fits(in_a, in_b, ABOVE)) {
            good = false;
            break;
          }
        }
      }
      float* const c_rows = g.c + i * next;
      for (int64_t j = 0; j < g.N; j += 2 * SIDE) {
        const int64_t at = j / SIDE * steps, pair = j + 2 * SIDE;
        const uint16_t* columns = (g.tiles && !WHOLE<B> ? ready : right) + at * PB * TILE;
        float* c = c_rows + j;
        const bool add = k > 0, wide = g.N - j > SIDE;
        Meanwhile meanwhile{};
        if (g.tiles && i == 0) {
          const uint16_t* next = pair < g.N ? ready + (at + 2 * steps) * HELD * TILE : nullptr;
          meanwhile = {next ? next : next_panel, nullptr, nullptr, 2 * HELD * ROW * SIDE, g.N - pair > SIDE};
          if (WHOLE<B>) {
            if (j == 0) Meanwhile{nullptr, ready, right, 0, wide}.all(steps);
            meanwhile.whole = next;
            meanwhile.unfolded = right + (at + 2 * steps) * PB * TILE;
            if (pair + 2 * SIDE < g.N) meanwhile.soon = ready + (at + 4 * steps) * TILE;
          }
        }
        if (rows > SIDE)
          (wide ? tile<PA, PB, LIMIT, 2, 2> : tile<PA, PB, LIMIT, 2, 1>)(left, columns, steps, c, g.pitch, add,
                                                                         meanwhile);
        else if (g.product_rows <= SIDE)
          (wide ? tile<PA, PB, LIMIT, 1, 2, true> : tile<PA, PB, LIMIT, 1, 1, true>)(
              left, columns, steps, c, g.pitch, add, meanwhile);
        else
          (wide ? tile<PA, PB, LIMIT, 1, 2> : tile<PA, PB, LIMIT, 1, 1>)(left, columns, steps, c, g.pitch, add,
                                                                         meanwhile);
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
