// The names of collectives and messages between ranks, from the table of the SDK.
#pragma once

#include "zr/names.hpp"

namespace zr::host {

using zr::kOperationNames;
using zr::name_of_op;

}  // namespace zr::host
