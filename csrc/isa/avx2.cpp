#define TENSORLOGIC_ISA avx2
#define TENSORLOGIC_ISA_NAME "avx2"
#include "simd/avx2.h"

#include "kernels/table.h"
