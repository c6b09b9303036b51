// The parts of a session that saving, loading, and setting a tensor read or change.
#pragma once

#include "engine/engine_name.hpp"
#include "engine/gradient_flow.hpp"
#include "engine/local_gradients.hpp"
#include "engine/model_buffers.hpp"
#include "engine/optimizer_update.hpp"
#include "engine/run_recorder.hpp"
#include "engine/sharded_state.hpp"
#include "engine/step_recorder.hpp"
#include "engine/training_progress.hpp"
#include "engine/weight_monitor.hpp"

namespace zr::host::engine {

/// Passed to the objects that save, load and set tensors; the parts outlive these objects. Training thread only.
struct TrainingParts {
  ShardedState& state;
  TrainingProgress& progress;
  ModelBuffers& buffers;
  WeightMonitor& weights;
  GradientFlow& gradients;
  StepRecorder& step_recorder;
  RunRecorder& recorder;
  EngineName& name;
  OptimizerUpdate& update;
  LocalGradients& local;
};

}  // namespace zr::host::engine
