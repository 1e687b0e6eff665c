#define TENSORLOGIC_ISA portable
#define TENSORLOGIC_ISA_NAME "portable"
#include "simd/portable.h"

#include "kernels/table.h"
