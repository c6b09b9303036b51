// What the configuration decided about a job, before a model is known.
#pragma once

#include <memory>

#include "control/control.hpp"
#include "plugin/plugin_selection.hpp"

namespace zr::host {

/// The job of one engine: configuration, loaded plug-ins, and the connection to the other ranks. Copyable.
struct Setup : ResolvedJob {
  std::shared_ptr<Control> control;
  Revalidate revalidate;  // the same job with other keys: for what a job over its budget could change
};

}  // namespace zr::host
