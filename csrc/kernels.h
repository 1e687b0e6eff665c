// What the kernels of one instruction set offer to the operators: a table of functions over raw
// contiguous memory. Kernels own no threads and no memory: the caller splits the work and provides
// outputs and scratch.
#pragma once

#include <stdint.h>

#include <atomic>

#define INLINE static inline __attribute__((always_inline))
#define INLINE_MEMBER inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace tensorlogic {

enum class DType : int32_t { f32, f16, bf16, f64 };  // f64: operands of products only, narrowed as they are packed
struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};
struct Even {};  // every other one of 2 W elements
struct Odd {};
// Runs the statements with T as the element type: the one place where a dtype becomes a type, and DISPATCH_WIDE,
// of an operand that may be float64.
#define DISPATCH(dtype, T, ...) \
  switch (dtype) {              \
    case DType::f32: {          \
      using T = float;          \
      __VA_ARGS__;              \
      break;                    \
    }                           \
    case DType::f16: {          \
      using T = f16;            \
      __VA_ARGS__;              \
      break;                    \
    }                           \
    case DType::bf16: {         \
      using T = bf16;           \
      __VA_ARGS__;              \
      break;                    \
    }                           \
    case DType::f64:            \
      break;                    \
  }
#define DISPATCH_WIDE(dtype, T, ...)     \
  if ((dtype) == DType::f64) {           \
    using T = double;                    \
    __VA_ARGS__;                         \
  } else {                               \
    DISPATCH(dtype, T, __VA_ARGS__)      \
  }

constexpr int64_t item_size(DType t) { return t == DType::f64 ? 8 : t == DType::f32 ? 4 : 2; }

enum class Activation : int32_t { none, relu, gelu, gelu_tanh, silu };

// Backward formulas take dy first. `relu_bwd` and its kin take the forward's output, the others its
// inputs.
enum class Elementwise : int32_t {
  add,
  sub,
  mul,
  div,
  add_relu,
  mul_relu,
  affine,
  neg,
  relu,
  gelu,
  gelu_tanh,
  silu,
  relu_bwd,
  gelu_bwd,
  gelu_tanh_bwd,
  silu_bwd,
  mul_bwd,
  mul_relu_bwd,
  div_bwd
};

enum class Reduction : int32_t { sum, mean, max, min };

// How an operand meets the [rows, cols] output: whole, a [cols] vector, a [rows, 1] column, or one
// element.
enum class Mode : int32_t { full, row, column, one };

struct Operand {
  const void* data;
  Mode mode;
};

struct ElementwiseCall {
  Elementwise op;
  DType dtype;
  Operand in[3];
  void* out[2];
  int64_t cols;
  bool stream;  // write past the caches
  bool near;    // a cache has the inputs: nothing is asked for ahead
};

struct EpilogueCall {  // y = activation(acc + bias + residual), acc [rows, cols]
  Activation activation;
  DType acc_dtype, dtype;  // dtype is that of bias, residual and y
  const void* acc;
  const void* bias;      // [cols] or null
  const void* residual;  // [rows, cols] or null
  void* y;
  void* pre;  // what the activation saw, or null
  int64_t cols;
  bool stream;
};

struct LayerNormCall {
  DType in, out;
  const void* x;
  const float* gamma;  // [cols] or null
  const float* beta;   // [cols] or null
  void* y;
  float* mean;  // [rows]
  float* rstd;  // [rows]
  int64_t cols;
  float eps;
};

struct LayerNormBackwardCall {
  DType dtype;
  const void* dy;
  const void* x;
  const float* gamma;  // [cols] or null
  const float* mean;
  const float* rstd;
  void* dx;
  float* dgamma;  // [cols], added to
  float* dbeta;   // [cols], added to
  int64_t cols;
};

struct SoftmaxCall {  // y = softmax(scale * x + mask) over the last dimension
  DType in, out;
  const void* x;
  void* y;
  const void* mask;     // added, in mask_dtype; or null
  const uint8_t* keep;  // 0 means excluded; or null
  DType mask_dtype;
  int64_t mask_dims;  // a row's place in the mask: its index in these dimensions, innermost first
  int64_t mask_sizes[8], mask_strides[8];
  int64_t cols;
  int64_t causal_rows;  // > 0: row r sees columns 0 .. r % causal_rows
  float scale;
};

struct CrossEntropyCall {
  DType dtype;
  const void* logits;
  const int64_t* target;
  float* loss;  // [rows]
  float* lse;   // [rows]
  int64_t cols;
  int64_t ignore_index;
  float smoothing;
};

struct CrossEntropyBackwardCall {
  DType dtype;
  const void* logits;
  const int64_t* target;
  const float* lse;
  const float* dloss;  // [rows]
  void* dlogits;
  int64_t cols;
  int64_t ignore_index;
  float smoothing;
  bool stream;
};

struct DropoutCall {  // y[i] = uniform(seed, offset, i) >= p ? x[i] * scale : 0
  DType dtype;
  const void* x;
  void* y;
  uint64_t seed, offset;
  float p, scale;
};

struct LookCall {  // squares[i] = sum over k of x[i, k]², peaks[i] = the largest |x[i, k]|; peaks may be null
  const void* x;       // element (i, k) at x[i * row + at[k] * col]
  bool wide;           // float64; else dtype
  DType dtype;
  int64_t row, col;
  const int64_t* at;  // `count` places, in runs of 16 that lie side by side, the last one maybe shorter
  int64_t count;
  double *squares, *peaks;
};

// A matrix of any layout: element (i, j) lies at data[i * row + j * col].
struct Matrix {
  const void* data;
  DType dtype;
  int64_t row, col;
};

struct GemmCall;

// A block of a product whose rows are taken group by group: by the thread that packs its right panels, and by those that have
// nothing left of their own. Who begins a block ends it.
class alignas(64) Share {
 public:
  // Whether the block is this thread's: nobody had begun it.
  bool begin() { return !begun.exchange(true); }
  void end() { over.store(true, std::memory_order_relaxed); }
  // For its owner: right panels number `panel` are ready, and its groups of rows may be taken.
  void open(const GemmCall* block, int64_t panel, int64_t groups, bool is_last) {
    call = block;
    count.store(groups, std::memory_order_relaxed);
    last.store(is_last, std::memory_order_relaxed);
    left.store(groups, std::memory_order_relaxed);
    at.store(static_cast<uint64_t>(panel + 1) << 32, std::memory_order_release);
  }
  // A group that nobody else has, where so many are left; none is 0. Each is to be done and said to be.
  uint64_t take(int64_t fewest = 1) {
    uint64_t now = at.load(std::memory_order_acquire);
    while (now != 0 && group(now) + fewest <= count.load(std::memory_order_relaxed))
      if (at.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) return now;
    return 0;
  }
  // Whether so many groups at a time may yet be there to take.
  bool promises(int64_t fewest) const {
    if (over.load(std::memory_order_relaxed)) return false;
    const uint64_t now = at.load(std::memory_order_acquire);
    const int64_t groups = count.load(std::memory_order_relaxed);
    return now == 0 || (fewest <= groups && (!last.load(std::memory_order_relaxed) || group(now) + fewest <= groups));
  }
  void done() { left.fetch_sub(1, std::memory_order_release); }
  bool all_done() const { return left.load(std::memory_order_acquire) == 0; }
  static int64_t group(uint64_t taken) { return static_cast<int64_t>(taken & 0xffffffff); }
  static int64_t panel(uint64_t taken) { return static_cast<int64_t>(taken >> 32) - 1; }

  const GemmCall* call = nullptr;  // while a group of it is taken, and not done

 private:
  std::atomic<bool> begun{false}, over{false}, last{false};
  std::atomic<uint64_t> at{0};
  std::atomic<int64_t> left{0}, count{0};
};

struct GemmCall {  // a · b, a [M, K], b [K, N], handed over in runs of rows while they lie in the first cache
  Matrix a, b;
  int64_t M, N, K;
  int64_t product_rows;  // of which M are this call's: what the order of sums may depend on
  const void* tiles;      // or null: all of b as gemm_pack laid it out, of which this call's columns begin at `first`
  int64_t tiles_N, first;
  int parts;      // bfloat16 parts that tell enough of a float32 operand: 3 all of it; kernels may use more
  std::atomic<bool>* coarse;  // of gemm_steps: set where the numbers do not go into steps
  int64_t depth;  // of the panels: 1 to gemm_depth units
  // Sums in float32, rows `pitch` >= N apart, N and the rows rounded up to whole tiles: all M rows, or, where
  // K <= depth, only those of one tile.
  float* c;
  int64_t pitch;
  bool all_rows;
  void (*done)(void* context, const float* c, int64_t row, int64_t rows);
  void* context;
  float* scratch;  // gemm_scratch(N, depth) floats; it and c aligned to 64
  Share* share;    // or null: nobody helps
  // Of who helps: what was taken of the share, and gemm_scratch(0, depth) floats, behind which c is where it has one tile's rows.
  uint64_t taken;
  float* own;
};

constexpr int64_t SHORT_ROW = 32;
constexpr int64_t DOTS = 12;  // rows of a weight that dot_rows takes together divide it, so runs of that many have the same bits in any order
constexpr int64_t AXPY_ROWS = 6;  // of x, whose sums axpy_rows keeps in memory: those of more stay in registers, and w is met in strips
// Elements: walks along memory ask for what lies a page or two ahead, whose addresses take longest to find.
constexpr int64_t AHEAD = 2048;
// Of powers of two: numbers below are 0 where exponentials are scaled, as many processors take hundreds of cycles for a vector in which
// one is denormal, or would be.
constexpr float LEAST_EXPONENT = -120.0f;

struct Kernels {
  const char* name;
  int width;  // float32 lanes
  void (*elementwise)(const ElementwiseCall&, int64_t begin, int64_t end);
  void (*convert)(DType from, DType to, const void* x, void* y, int64_t n, bool stream);
  void (*epilogue)(const EpilogueCall&, int64_t begin, int64_t end);
  void (*dropout)(const DropoutCall&, int64_t begin, int64_t end);
  void (*layer_norm)(const LayerNormCall&, int64_t begin, int64_t end);
  void (*layer_norm_backward)(const LayerNormBackwardCall&, int64_t begin, int64_t end);
  void (*softmax)(const SoftmaxCall&, int64_t begin, int64_t end);
  void (*softmax_backward)(DType, const void* dy, const void* y, void* dx, int64_t cols,
                           float scale, int64_t begin, int64_t end);
  void (*cross_entropy)(const CrossEntropyCall&, int64_t begin, int64_t end);
  void (*cross_entropy_backward)(const CrossEntropyBackwardCall&, int64_t begin, int64_t end);
  // y[r, j] = max(acc[r, j] * scale[j] + shift[j], 0)
  void (*scaled_relu)(DType, const float* acc, const float* scale, const float* shift, void* y,
                      int64_t cols, int64_t begin, int64_t end);
  // One run of n contiguous elements to one value; n elements per call bounds the float32 error.
  float (*reduce)(Reduction, DType, const void* x, int64_t n);
  // acc[j] (op)= x[i * stride + j] for i < n, j < cols; acc holds sums, or running extremes.
  void (*reduce_columns)(Reduction, DType, const void* x, float* acc, int64_t n, int64_t cols,
                         int64_t stride);
  // y[r] = rows [rows, n] each to one value
  void (*reduce_rows)(Reduction, DType, const void* x, float* y, int64_t rows, int64_t n);
  // y[m, n] = sum_k x[m, k] w[n * step + k]; x [M, K], y [M, N]; `large` where w may lie beyond the second-level cache
  void (*dot_rows)(DType, const void* w, const float* x, float* y, int64_t K, int64_t M, int64_t N,
                   int64_t step, bool large);
  // y[m, n] += sum_k x[m * pitch + k] w[k * step + n]
  void (*axpy_rows)(DType, const void* w, const float* x, float* y, int64_t K, int64_t pitch, int64_t M,
                    int64_t N, int64_t step, bool large);
  // What a guard looks at, see kernels/data_statistics.h: of n rows of count elements each.
  void (*look)(const LookCall&, int64_t begin, int64_t end);
  void (*gemm)(const GemmCall&);
  int gemm_rows, gemm_columns;  // of a tile
  bool gemm_whole_rows;         // c is written in whole tiles down, too
  int64_t gemm_depth;
  // Of a block, whose sums and right panels stay in the second-level cache.
  int64_t gemm_block_rows, gemm_block_cols;
  int64_t gemm_along, gemm_turned;  // multiply-adds that packing an element costs, in runs of memory and across them
  int64_t (*gemm_scratch)(int64_t N, int64_t depth);
  bool gemm_pairs;  // two bfloat16 products cost one of float32
  // Null, or whether this gemm serves a product of these types and sizes; if not, the other level's does.
  bool (*gemm_pays)(DType a, DType b, int parts, int64_t M, int64_t N, int64_t K);
  // Null, or right operands laid out once for many products: how many bytes, and columns first to last of it, a
  // multiple of gemm_columns but for the matrix's last. False where the numbers do not go into that layout.
  int64_t (*gemm_packed)(DType b, int64_t N, int64_t K);
  bool (*gemm_pack)(const Matrix& b, int64_t first, int64_t last, int64_t N, int64_t K, void* out);
  const Kernels* gemm_otherwise;
  // Null, or float32 to whole numbers of steps: two products cost one of float32; the rest as for gemm.
  void (*gemm_steps)(const GemmCall&);
};

}  // namespace tensorlogic
