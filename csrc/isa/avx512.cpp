#define TENSORLOGIC_ISA avx512
#define TENSORLOGIC_ISA_NAME "avx512"
#include "simd/avx512.h"

#include "kernels/table.h"
