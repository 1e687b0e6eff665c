// The product on AMX, for the table of its level.
#pragma once

#include "kernels.h"

namespace tensorlogic::amx {

constexpr int64_t ROWS = 32, COLUMNS = 32, DEPTH = 512;
constexpr int64_t BLOCK_ROWS = 512, BLOCK_COLUMNS = 512, ALONG = 40, TURNED = 60;
// False where splitting and packing cost more than the tiles bring.
bool pays(DType a, DType b, int parts, int64_t M, int64_t N, int64_t K);
void gemm(const GemmCall& g);
int64_t scratch(int64_t N, int64_t depth);
int64_t packed(DType b, int64_t N, int64_t K);
bool pack(const Matrix& b, int64_t first, int64_t last, int64_t N, int64_t K, void* out);

}  // namespace tensorlogic::amx
