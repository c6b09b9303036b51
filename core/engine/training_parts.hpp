// What a checkpoint holds, and what follows from loading one or from writing to a tensor.
#pragma once

#include "engine/engine_name.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/model_buffers.hpp"
#include "engine/run_recorder.hpp"
#include "engine/sharded_state.hpp"
#include "engine/step_recorder.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_monitor.hpp"

namespace zr::host {

/// Parts of a session, for those that save, load and set what they hold; all outlive them. Training thread only.
struct TrainingParts {
  ShardedState& state;
  TrainingProgress& progress;
  ModelBuffers& buffers;
  WeightMonitor& weights;
  GradientFlow& gradients;
  StepRecorder& step_recorder;
  RunRecorder& recorder;
  EngineName& name;
};

}  // namespace zr::host
