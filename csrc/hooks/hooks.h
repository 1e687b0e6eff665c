// What PyTorch's stable ABI does not reach: a small library built per version of PyTorch, optional.
#pragma once

namespace tensorlogic::hooks {

void pool_all(bool on);  // every CPU tensor of pool::SMALLEST bytes and more comes from the pool
bool pools_all();

}  // namespace tensorlogic::hooks
