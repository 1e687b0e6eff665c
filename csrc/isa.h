// Which instruction set serves: found at run time, or forced by a test.
#pragma once

#include <string>

#include "kernels.h"

namespace tensorlogic {

const Kernels& kernels();    // the table in use
std::string isa_name();      // "portable", "avx2", "avx512", "avx512_bf16" or "amx"
std::string isa_features();  // comma-separated: levels and features this machine has; "zen5": or later
std::string set_isa(
    const std::string& level);  // "auto" or a level; returns the previous one; throws if unknown

}  // namespace tensorlogic
