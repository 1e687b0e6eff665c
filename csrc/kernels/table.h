// All kernels of one instruction set, gathered into its table. A kernel source includes one simd
// header, then this.
#pragma once

#include "simd/math.h"

#include "kernels/elementwise.h"
#include "kernels/dropout_rng.h"
#include "kernels/row_walk.h"
#include "kernels/data_statistics.h"
#include "kernels/gemm.h"
#include "kernels/reduce.h"
#include "kernels/rows.h"
#include "kernels/gemv.h"

namespace tensorlogic::TENSORLOGIC_ISA {

extern const Kernels table;
const Kernels table = {
    TENSORLOGIC_ISA_NAME,
    W,
    elementwise,
    convert,
    epilogue,
    dropout,
    layer_norm,
    layer_norm_backward,
    softmax,
    softmax_backward,
    cross_entropy,
    cross_entropy_backward,
    scaled_relu,
    reduce,
    reduce_columns,
    reduce_rows,
    dot_rows,
    axpy_rows,
    look,
    gemm_by<BySingles>,
    MR,
    NR,
    false,
    KC,
    512,
    256,
    24,
    30,
    gemm_scratch,
    false,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
    nullptr,
};

}  // namespace tensorlogic::TENSORLOGIC_ISA
