/* Compiled into every file of the later host and of the newer plug-ins: the structs have grown (grow.awk). */
#include "zr/abi/strategy.h"

ZR_STATIC_ASSERT(sizeof(zr_use) == ZR_SIZE_0_9(zr_use) + ZR_EXPECTED_GROWTH, "the headers of a later version are used");
