// What the engine requires of memory that a plug-in passes to it.
#pragma once

#include <string>

#include "base/unknown_bits.hpp"
#include "zr/abi/base.h"

namespace zr::host {

/// Why the engine cannot use the memory of this view, named `name` in messages: it is not CPU memory, or the view has
/// flags. "" if it can.
inline std::string host_view_problem(const std::string& name, const zr_view& view) {
  if (view.device.type != ZR_DEVICE_CPU) return name + " is not in CPU memory";
  return reserved_problem(name + ".flags", view.flags);
}
/// Why the engine cannot use the memory of this view as memory of `device`, which may be the CPU; "" if it can.
inline std::string view_problem_on(const zr_device& device, const std::string& name, const zr_view& view) {
  if (device.type == ZR_DEVICE_CPU) return host_view_problem(name, view);
  if (view.device.type != device.type || view.device.id != device.id)
    return name + " is not in memory of the engine's device";
  return reserved_problem(name + ".flags", view.flags);
}

}  // namespace zr::host
