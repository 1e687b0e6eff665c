// One product as its operators describe it, and what carries it out.
#pragma once

#include "stable_abi.h"

namespace tensorlogic::ops {

constexpr int64_t MOST = 64;  // dimensions

struct Product {
  Matrix a, b;
  int64_t M, N, K, batch = 1;
  int64_t dims = 0, sizes[MOST], a_steps[MOST], b_steps[MOST];  // of the batch, in elements
  Activation activation;
  DType dtype;
  int parts = 3;  // of a float32 operand, see GemmCall
  bool steps = false;  // whole numbers of steps are enough, where they do
  std::atomic<bool>* coarse = nullptr;  // where they are tried: whether they did not
  const char *bias = nullptr, *residual = nullptr;
  char *y = nullptr, *pre = nullptr;
  const void* tiles = nullptr;  // all of b, packed
};

// Writes p.y, and p.pre where it is given.
void run(Product& p);

// The product in float32 of operands of which `parts` tell enough, see matmul_f32.
Output product_f32(const char* op, const Input& a, const Input& b, bool transposed, int64_t parts);

}  // namespace tensorlogic::ops
