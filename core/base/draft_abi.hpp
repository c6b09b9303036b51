// The draft headers of the plug-in ABI, for the engine. Plug-ins that include them get a tag; the engine must not.
#pragma once

#define ZR_NO_DRAFT_TAG
#include "zr/abi/draft/device.h"
#include "zr/abi/draft/local_gradients.h"
#include "zr/abi/draft/offload_layers.h"
#include "zr/abi/draft/optimizer_globals.h"
#include "zr/abi/draft/optimizer_shapes.h"
#include "zr/abi/draft/partial_sums.h"
