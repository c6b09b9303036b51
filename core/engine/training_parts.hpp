// The parts of a session that saving, loading, and setting a tensor read or change.
#pragma once

#include "engine/gradient_flow.hpp"
#include "engine/local_gradients.hpp"
#include "engine/model_buffers.hpp"
#include "engine/optimizer_update.hpp"
#include "engine/step_timer.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_monitor.hpp"
#include "job/engine_name.hpp"
#include "run/run_log.hpp"
#include "state/sharded_state.hpp"

namespace zr::host::engine {

/// Passed to the objects that save, load and set tensors; the parts outlive these objects. Training thread only.
struct TrainingParts {
  state::ShardedState& state;
  TrainingProgress& progress;
  ModelBuffers& buffers;
  WeightMonitor& weights;
  GradientFlow& gradients;
  StepTimer& step_timer;
  run::RunLog& log;
  job::EngineName& name;
  OptimizerUpdate& update;
  LocalGradients& local;
};

}  // namespace zr::host::engine
