// The part of a job that does not depend on the model.
#pragma once

#include <memory>

#include "control/control.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host::job {

/// The job of one engine: configuration, loaded plug-ins, and the connection to the other ranks. Copyable.
struct Setup : plugin::ResolvedJob {
  std::shared_ptr<control::Control> control;
  plugin::Revalidate
      revalidate;  // resolves the same job with other keys, for suggestions when it exceeds its memory budget
};

}  // namespace zr::host::job
