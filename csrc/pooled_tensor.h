// How pooled memory becomes a tensor: PyTorch's from_blob, unless the hooks can do better.
#pragma once

#include <stdint.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include "pool.h"

namespace tensorlogic {

// A tensor that owns the block (data, ticket) whatever happens; 0 where that succeeded.
using Adopt = int (*)(void* data, void* ticket, int64_t bytes, int64_t dim, const int64_t* sizes,
                      const int64_t* strides, int32_t code, AtenTensorHandle* out);
TENSORLOGIC_EXPORT void set_adopt(Adopt adopt);

}  // namespace tensorlogic
