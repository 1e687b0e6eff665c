// Products of matrices of any layout: batches, split into blocks that threads take, each finished by
// the epilogue while it lies in the cache.
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "thread_pool.h"
#include "isa.h"
#include "product.h"

namespace tensorlogic::ops {
namespace {

constexpr int64_t WIDEST = 2048;      // where few rows leave room and a row of b is one run of memory
constexpr int64_t BLOCK = 16 << 10;       // multiply-adds that take as long as a block's own preparations
constexpr int64_t LANES_GRAIN = 320 << 10;  // multiply-adds, without tiles, from which a thread that spins pays
constexpr int64_t FEW_GRAIN = 160 << 10;  // of one row a thread; where all rows pass the grain above, any number
constexpr int64_t STEPS_ROWS = 64;  // of left, below which turning right into steps takes what they bring
constexpr int64_t LARGE = 1 << 20;  // bytes of b that the second-level caches hardly kept from an earlier call
constexpr int64_t FEW_SUMS = 12 << 10;  // of theirs at a time: more would not stay in the first cache

// Waking a thread costs 1 us where threads spin while they wait, and 9 where they were told to sleep.
int64_t patience() {
  static const bool sleeps = [] {
    const char* policy = std::getenv("OMP_WAIT_POLICY");
    return policy && (*policy == 'p' || *policy == 'P');
  }();
  return sleeps ? 4 : 1;
}

// How many parts tiles have of an operand, and how many products of them one is: all of them, but for the least of float32's.
int64_t parts(const Product& p, DType t) { return t == DType::bf16 ? 1 : t == DType::f16 ? 2 : p.parts; }
int64_t products(const Product& p) { return std::min<int64_t>(parts(p, p.a.dtype) * parts(p, p.b.dtype), 6); }

// Multiply-adds up to which a second thread costs more than it brings; a product of tiles does them four times as fast;
// where threads sleep, waking one costs as much as 2.4 Mi of any that has parts.
int64_t grain(const Kernels& k, const Product& p) {
  if (!k.gemm_pays) return patience() * LANES_GRAIN;
  return patience() * (1200 << 10) / (patience() > 1 ? std::min<int64_t>(products(p), 2) : products(p));
}

int64_t over(int64_t n, int64_t by) { return (n + by - 1) / by; }

// Memory of this thread, kept from call to call.
float* scratch(int64_t floats) {
  struct Buffer {
    std::unique_ptr<float[]> memory;
    int64_t size = 0;
  };
  static thread_local Buffer own;
  constexpr int64_t LINE = 64 / sizeof(float);
  if (own.size < floats + LINE) {
    own.memory.reset(new float[static_cast<size_t>(floats + LINE)]);
    own.size = floats + LINE;
  }
  const uintptr_t at = reinterpret_cast<uintptr_t>(own.memory.get());
  return reinterpret_cast<float*>((at + 63) / 64 * 64);
}

// How much larger blocks are, both ways, where a large second-level cache holds their right panels: AVX-512's have 384 KiB.
int64_t roomy(const Kernels& k) {
#ifdef _SC_LEVEL2_CACHE_SIZE
  static const bool large = sysconf(_SC_LEVEL2_CACHE_SIZE) >= 1 << 20;
#else
  constexpr bool large = false;
#endif
  return large && k.width >= 16 && !k.gemm_pays ? 2 : 1;
}

// Bytes of the third-level cache that a thread may count on, a quarter of its share: others use it, too. 0 where none is known.
int64_t third_level() {
  static const int64_t bytes = [] {
    int64_t kib = 0;
    if (FILE* file = std::fopen("/sys/devices/system/cpu/cpu0/cache/index3/size", "r")) {
      if (std::fscanf(file, "%" SCNd64 "K", &kib) != 1) kib = 0;
      std::fclose(file);
    }
    return kib << 10;
  }();
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  return bytes / 4 / threads;
}

// How many rows and columns a block has, so that the blocks occupy the threads evenly and little is packed twice.
struct Blocks {
  int64_t rows, cols, down, across, depth;
  int64_t count() const { return down * across; }
};

// The depth of the panels, and so the order of the sums, does not depend on the number of threads.
Blocks split(const Kernels& k, const Product& p) {
  const int64_t unit = k.gemm_columns;
  uint32_t threads = 1;
  torch_get_num_threads(&threads);
  if (p.batch * p.M * p.N * p.K <= grain(k, p)) threads = 1;
  const bool runs = p.b.col == 1 && !p.tiles;
  // steps take half of a panel's room and of the time to multiply it, so that packing it again costs twice as much
  const bool steps = p.coarse && roomy(k) > 1;
  const int64_t room = roomy(k) * (steps ? 2 : 1);
  // three parts of it would leave the second-level cache little room for what else passes through it
  const int64_t share = k.gemm_pays && parts(p, p.b.dtype) > 2 ? 2 : 1;
  const int64_t most_rows = k.gemm_block_rows * room, most_cols = k.gemm_block_cols * room / share;
  int64_t widest =
      runs && !steps ? std::clamp(most_rows * most_cols / std::min(p.M, most_rows), most_cols, WIDEST) : most_cols;
  int64_t depth = k.gemm_depth * most_cols / widest, tallest = over(p.M, most_rows);
  const bool pairs = k.gemm_pairs && (p.parts == 1 || (p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16));
  if (!steps && !k.gemm_pays) {  // panels of equal depth, and as wide as that leaves room
    const int64_t units = over(p.K, pairs ? 2 : 1), panels = over(units, depth);
    if (panels > 1) depth = std::min(depth, over(over(units, panels), k.width) * k.width);
    const int64_t room = k.gemm_depth * most_cols * 9 / 8 / std::max<int64_t>(std::min(depth, units), 1);
    widest = std::max(widest, room / unit * unit);
    tallest = over(p.M, 2 * most_rows);
    // Many rows meet wide panels as fast in the third-level cache, and are fetched and packed less often.
    if (p.dtype == DType::f32 && p.M >= most_rows) widest = std::max(widest, third_level() / (4 * depth) / unit * unit);
  }
  const int64_t times = pairs ? 2 : 1;  // as fast
  const int64_t right = p.tiles ? 0 : times * (runs ? k.gemm_along : k.gemm_turned),
                left = times * (p.a.col == 1 ? k.gemm_along : k.gemm_turned);
  const int64_t narrowest = over(p.N, widest);
  Blocks best{};
  int64_t least = 0;
  auto consider = [&](int64_t down, int64_t across) {
    Blocks found{over(p.M, down), over(over(p.N, across), unit) * unit, 0, 0, depth};
    found.down = over(p.M, found.rows);
    found.across = over(p.N, found.cols);
    const int64_t turns = over(found.count() * p.batch, threads);
    const int64_t cost =
        turns * (found.rows * found.cols + right * found.cols + left * found.rows);
    if (best.rows && cost >= least) return;
    best = found;
    least = cost;
  };
  consider(tallest, narrowest);
  if (threads == 1) return best;
  for (int64_t across = narrowest; across < narrowest + 8; ++across) {
    const int64_t each = over(threads, p.batch * across);  // blocks down that occupy all threads
    for (int64_t down : {tallest, tallest + 1, tallest + 2, each, 2 * each})
      if (down >= tallest) consider(down, across);
  }
  return best;
}

const char* at(const void* data, DType dtype, int64_t element) {
  return static_cast<const char*>(data) + element * item_size(dtype);
}

// Where matrix number `item` of the batch begins.
int64_t offset_of(const Product& p, const int64_t (&steps)[MOST], int64_t item) {
  int64_t at = 0;
  for (int64_t d = p.dims - 1; d >= 0; --d) {
    at += item % p.sizes[d] * steps[d];
    item /= p.sizes[d];
  }
  return at;
}

// Columns j to j + n of one row of the output, or all columns of several rows, from their float32 sums.
void finish(const Kernels& k, const Product& p, const float* acc, int64_t row, int64_t j, int64_t n,
            int64_t rows = 1) {
  const int64_t size = item_size(p.dtype), offset = (row * p.N + j) * size;
  EpilogueCall call{};
  call.activation = p.activation;
  call.acc_dtype = DType::f32;
  call.dtype = p.dtype;
  call.acc = acc;
  call.bias = p.bias ? p.bias + j * size : nullptr;
  call.residual = p.residual ? p.residual + offset : nullptr;
  call.y = p.y + offset;
  call.pre = p.pre ? p.pre + offset : nullptr;
  call.cols = n;
  k.epilogue(call, 0, rows * n);
}

// Whether the sums are the output.
bool plain(const Product& p) {
  return p.dtype == DType::f32 && !p.bias && !p.residual && !p.pre && p.activation == Activation::none;
}

// Whether the sums of a block are taken in the output's memory, which whole tiles fill: where nothing is left to do, or they
// would not stay in a cache elsewhere.
bool sums_stay(const Kernels& k, const Product& p, int64_t rows, int64_t cols) {
  if (p.dtype != DType::f32 || cols % k.gemm_columns || (k.gemm_whole_rows && rows % k.gemm_rows)) return false;
  return plain(p) || (third_level() > 0 && 2 * rows * cols * item_size(DType::f32) > third_level());
}

// One block of one matrix of the batch: rows from i, columns from j.
void block(const Kernels& k, const Product& p, const Blocks& blocks, int64_t item, int64_t i,
           int64_t j, Share* share) {
  GemmCall call{};
  call.a = {at(p.a.data, p.a.dtype, offset_of(p, p.a_steps, item) + i * p.a.row), p.a.dtype,
            p.a.row, p.a.col};
  call.b = {at(p.b.data, p.b.dtype, offset_of(p, p.b_steps, item) + j * p.b.col), p.b.dtype,
            p.b.row, p.b.col};
  call.M = std::min(blocks.rows, p.M - i);
  call.N = std::min(blocks.cols, p.N - j);
  call.K = p.K;
  call.product_rows = p.M;
  call.parts = p.parts;
  call.coarse = p.coarse;
  call.tiles = p.tiles;
  call.tiles_N = p.N;
  call.first = j;
  call.depth = blocks.depth;
  call.pitch = over(call.N, k.gemm_columns) * k.gemm_columns;
  const int64_t once = std::min(call.depth, k.gemm_otherwise ? k.gemm_otherwise->gemm_depth : call.depth);
  const bool stay = sums_stay(k, p, call.M, call.N);
  call.all_rows = stay || call.K > once;
  const int64_t tiles = call.all_rows ? over(call.M, k.gemm_rows) : 1;
  const int64_t sums = stay ? 0 : tiles * k.gemm_rows * call.pitch;
  call.c = scratch(sums + k.gemm_scratch(call.N, call.depth));
  call.scratch = call.c + sums;
  if (stay) {
    call.c = reinterpret_cast<float*>(p.y) + (item * p.M + i) * p.N + j;
    call.pitch = p.N;
  }
  const bool whole = call.N == p.N && call.pitch == p.N;
  auto done = [&](const float* c, int64_t row, int64_t rows) {
    if (stay && plain(p)) return;
    const int64_t first = item * p.M + i + row;
    if (whole) return finish(k, p, c, first, j, call.N, rows);
    for (int64_t r = 0; r < rows; ++r) finish(k, p, c + r * call.pitch, first + r, j, call.N);
  };
  call.share = share;
  call.context = &done;
  call.done = [](void* context, const float* c, int64_t row, int64_t rows) {
    (*static_cast<decltype(done)*>(context))(c, row, rows);
  };
  (p.coarse ? k.gemm_steps : k.gemm)(call);
}

constexpr int64_t FEWEST = 10;  // groups of rows from which help pays: right panels lie in the cache of who packed them
constexpr int64_t UNTROUBLED = 32;  // pauses between two looks, which take the block's state out of its owner's cache
// Groups of rows of blocks that others have begun, as they come, until there will be none.
void help(const Kernels& k, const Blocks& blocks, Share* shares, int64_t count) {
  const int64_t size = k.gemm_scratch(0, blocks.depth);
  float* own = scratch(size + k.gemm_rows * over(blocks.cols, k.gemm_columns) * k.gemm_columns);
  bool waits = true;
  for (int64_t turn = 0; waits;) {
    waits = false;
    for (int64_t n = 0; n < count; ++n) {
      waits |= shares[n].promises(FEWEST);
      if (const uint64_t taken = shares[n].take(FEWEST)) {
        GemmCall call = *shares[n].call;
        call.own = own;
        call.taken = taken;
        k.gemm(call);
      }
    }
    for (int64_t n = 0; waits && n < UNTROUBLED; ++n) crew::pause(turn++);
  }
}

struct Ending {  // of a block, also without memory for it
  Share& share;
  ~Ending() { share.end(); }
};

constexpr int64_t MOST_SHARED = 64;  // blocks: of more, those that one thread has are a fair share

void in_blocks(const Kernels& k, const Product& p) {
  const Blocks blocks = split(k, p);
  const int64_t count = p.batch * blocks.count();
  const bool alone = p.batch * p.M * p.N * p.K + count * BLOCK <= grain(k, p);
  const bool shared = !alone && count <= MOST_SHARED && !k.gemm_pays && !p.coarse;
  const std::unique_ptr<Share[]> shares(shared ? new Share[static_cast<size_t>(count)] : nullptr);
  auto run = [&](int64_t n, Share* share) {
    const int64_t item = n / blocks.count(), inside = n % blocks.count();
    block(k, p, blocks, item, inside % blocks.down * blocks.rows, inside / blocks.down * blocks.cols, share);
  };
  // A thread waits for what another has begun, and is at: also where one thread runs all pieces, one after the other.
  parallel(count, alone ? count : 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < (shared ? begin + count : end); ++n) {
      if (!shared) {
        run(n, nullptr);
      } else if (Share& share = shares[static_cast<size_t>(n % count)]; share.begin()) {
        const Ending ending{share};
        run(n % count, &share);
      }
    }
    if (shared) help(k, blocks, shares.get(), count);
  });
}

// Up to so many rows, b is read as it lies instead of being packed: each of its elements serves few products.
int64_t few_rows(const Kernels& k, const Product& p, bool turned = false) {
  if (p.a.dtype == DType::f64 || p.b.dtype == DType::f64) return 0;
  const bool pairs = k.gemm_pairs && p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16;
  if (p.b.row == 1) {  // along K: dot products, whose ends cost as much as a block's packing where they are short
    const int64_t most = k.gemm_pays ? 12 : 16;
    return pairs ? 5 : turned ? most : std::min(most, std::max<int64_t>(p.K / k.width, 4));
  }
  if (p.b.col != 1) return 0;
  if (k.gemm_pays) return p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16 ? 6 : 12;  // tiles serve more
  return pairs ? 4 : 16;
}

// n elements, `step` apart, in float32.
void gather(const Kernels& k, DType dtype, const char* data, int64_t step, int64_t n, float* to) {
  if (step == 1) return k.convert(dtype, DType::f32, data, to, n, false);
  if (dtype == DType::f32) {
    for (int64_t i = 0; i < n; ++i) to[i] = reinterpret_cast<const float*>(data)[i * step];
    return;
  }
  constexpr int64_t SOME = 256;
  uint16_t halves[SOME];
  for (int64_t from = 0; from < n; from += SOME) {
    const int64_t count = std::min(n - from, SOME);
    for (int64_t i = 0; i < count; ++i) halves[i] = reinterpret_cast<const uint16_t*>(data)[(from + i) * step];
    k.convert(dtype, DType::f32, halves, to + from, count, false);
  }
}

// Bytes of all matrices of b.
int64_t right_bytes(const Product& p) {
  int64_t matrices = 1;
  for (int64_t d = 0; d < p.dims; ++d)
    if (p.b_steps[d]) matrices *= p.sizes[d];
  return matrices * p.N * p.K * item_size(p.b.dtype);
}

constexpr int64_t WIDEST_ROW = 4096;  // whose sums stay in the first cache
constexpr int64_t MOST_PARTS = 16, PART_ROWS = 128;  // rows of a part, at least

// One row by a large b [K, N] of halves: threads take rows of b rather than columns, so that memory comes as streams, and the parts' sums are
// added in their order, which is one for any number of threads.
void by_parts(const Kernels& k, const Product& p, int64_t item, const float* x) {
  const char* b = at(p.b.data, p.b.dtype, offset_of(p, p.b_steps, item));
  const int64_t rows = over(over(p.K, std::min(p.K / PART_ROWS, MOST_PARTS)), 4) * 4, parts = over(p.K, rows);
  float* sums = scratch(parts * p.N);
  parallel(parts, 1, 1, [&](int64_t begin, int64_t end) {
    for (int64_t part = begin; part < end; ++part) {
      const int64_t from = part * rows;
      float* to = sums + part * p.N;
      std::fill(to, to + p.N, 0.0f);
      k.axpy_rows(p.b.dtype, at(b, p.b.dtype, from * p.b.row), x + from, to, std::min(rows, p.K - from), 0, 1, p.N, p.b.row, true);
    }
  });
  static constexpr float ones[MOST_PARTS] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  parallel(p.N, 1024, 64, [&](int64_t begin, int64_t end) {
    k.axpy_rows(DType::f32, sums + p.N + begin, ones, sums + begin, parts - 1, 0, 1, end - begin, p.N, false);
    finish(k, p, sums + begin, item, begin, end - begin);
  });
}

// As many rows as few_rows says. Where `turned`, p is the transposed product, and p.bias has an element a row.
void by_few_rows(const Kernels& k, const Product& p, bool turned) {
  const bool dense = p.a.col == 1 && (p.M == 1 || p.a.row == p.K), lies = dense && p.a.dtype == DType::f32;
  const int64_t size = lies ? 0 : p.M * p.K;
  std::unique_ptr<float[]> x(new float[static_cast<size_t>(p.batch * size + p.M)]);
  const int64_t run = dense ? p.M : 1;
  for (int64_t i = 0; !lies && i < p.batch * p.M; i += run) {
    const int64_t from = offset_of(p, p.a_steps, i / p.M) + i % p.M * p.a.row;
    gather(k, p.a.dtype, at(p.a.data, p.a.dtype, from), p.a.col, run * p.K, x.get() + i * p.K);
  }
  float* bias = x.get() + p.batch * size;
  if (!turned || !p.bias)
    std::fill(bias, bias + p.M, 0.0f);
  else
    k.convert(p.dtype, DType::f32, p.bias, bias, p.M, false);
  Product output = p;  // as it is finished
  if (turned) {
    output.N = p.M;
    output.bias = nullptr;
  }
  auto left = [&](int64_t item) {
    return lies ? reinterpret_cast<const float*>(at(p.a.data, p.a.dtype, offset_of(p, p.a_steps, item))) : x.get() + item * size;
  };
  const bool dots = p.b.row == 1;
  const int64_t unit = dots ? DOTS : 64, columns = over(p.N, unit) * unit;  // so that no unit spans two items
  const bool as_they_are = plain(p) && !turned;
  const int64_t most = turned || !dots ? FEW_SUMS / p.M / unit * unit : p.N;  // columns at a time
  const bool large = right_bytes(p) > LARGE;
  const bool in_parts = large && !dots && !turned && p.M == 1 && item_size(p.b.dtype) == 2 && p.N <= WIDEST_ROW &&
                        p.K >= 2 * PART_ROWS && p.N * p.K * 2 > LARGE;
  for (int64_t item = 0; in_parts && item < p.batch; ++item) by_parts(k, p, item, left(item));
  if (in_parts) return;
  const bool many = p.batch * p.M * p.N * p.K > patience() * LANES_GRAIN;
  const int64_t each = many ? unit : std::max(unit, FEW_GRAIN / (p.K + 1));
  parallel(p.batch * columns, each, unit, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t item = begin / columns, j = begin % columns;
      const int64_t n = std::min(std::min(end - begin, columns - j), std::min(p.N - j, most));
      const void* w = at(p.b.data, p.b.dtype, offset_of(p, p.b_steps, item) + j * p.b.col);
      const bool stay = as_they_are && n == p.N;  // elsewhere the rows of y, far from each other, would leave the first cache
      float* acc = stay ? reinterpret_cast<float*>(p.y) + item * p.M * n : scratch((turned ? 2 : 1) * p.M * n);
      const float* xs = left(item);
      if (dots) {
        k.dot_rows(p.b.dtype, w, xs, acc, p.K, p.M, n, p.b.col, large);
      } else {
        std::fill(acc, acc + p.M * n, 0.0f);
        k.axpy_rows(p.b.dtype, w, xs, acc, p.K, p.K, p.M, n, p.b.row, false);
      }
      if (turned) {
        float* rows = acc + p.M * n;
        for (int64_t m = 0; m < p.M; ++m)
          for (int64_t r = 0; r < n; ++r) rows[r * p.M + m] = acc[m * n + r] + bias[m];
        finish(k, output, rows, item * p.N + j, 0, n * p.M);
      } else if (!stay && n == p.N) {
        finish(k, p, acc, item * p.M, 0, n, p.M);
      } else if (!stay) {
        for (int64_t m = 0; m < p.M; ++m) finish(k, p, acc + m * n, item * p.M + m, j, n);
      }
      begin = j + n < p.N ? begin + n : std::min(end, (item + 1) * columns);
    }
  });
}

// Whether the product is had as its transpose, whose few rows are this one's columns.
bool few_columns(const Kernels& k, const Product& p) {
  if (p.N == 1 && p.M > 1) return true;
  if (p.a.col != 1 || p.M < 4 || p.K < 64 || p.tiles) return false;
  const bool tiles = k.gemm_pays && k.gemm_pays(p.a.dtype, p.b.dtype, p.parts, p.M, p.N, p.K);
  const bool pairs = k.gemm_pairs && p.a.dtype == DType::bf16 && p.b.dtype == DType::bf16;
  return p.N <= (tiles ? 1 : p.M <= few_rows(k, p) || pairs ? 5 : 12);
}

Product transposed(Product p) {
  std::swap(p.M, p.N);
  std::swap(p.a, p.b);
  std::swap(p.a_steps, p.b_steps);
  std::swap(p.a.row, p.a.col);
  std::swap(p.b.row, p.b.col);
  return p;
}

}  // namespace

void run(Product& p) {
  if (p.batch * p.M * p.N == 0) return;
  const Kernels& k = kernels();
  if (p.tiles) return in_blocks(k, p);
  if (few_columns(k, p)) {
    const Product t = transposed(p);
    if (t.M <= few_rows(k, t, true)) return by_few_rows(k, t, true);
  }
  if (p.M <= few_rows(k, p)) return by_few_rows(k, p, false);
  if (p.steps && k.gemm_steps && p.M >= STEPS_ROWS) {
    std::atomic<bool> coarse{false};
    p.coarse = &coarse;
    in_blocks(k, p);
    p.coarse = nullptr;
    if (!coarse) return;
  }
  const bool served = !k.gemm_pays || k.gemm_pays(p.a.dtype, p.b.dtype, p.parts, p.M, p.N, p.K);
  in_blocks(served ? k : *k.gemm_otherwise, p);
}

}  // namespace tensorlogic::ops
