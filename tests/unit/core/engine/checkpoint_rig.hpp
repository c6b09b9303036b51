// A checkpoint with the tensors that a test adds, and a job of one rank that loads it.
#pragma once

#include <deque>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/dtype.hpp"
#include "checkpoint/safetensors.hpp"
#include "checkpoint/save.hpp"
#include "engine/checkpoint_loader.hpp"
#include "unit/core/one_rank.hpp"
#include "update/cast.hpp"

namespace zr::testing {

/// `from`, from + 1, from + 2, ...
inline std::vector<float> ramp(int64_t count, float from) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), from);
  return values;
}

/// The values rounded to `dtype`.
inline std::string bytes_of(const std::vector<float>& values, zr_dtype dtype = ZR_F32) {
  std::string bytes(values.size() * static_cast<std::size_t>(host::size_of(dtype)), '\0');
  host::update::downcast(values.data(), std::ssize(values), dtype, bytes.data());
  return bytes;
}

/// A checkpoint with the tensors that a test adds.
class NewCheckpoint {
 public:
  NewCheckpoint() {
    metadata.optimizer = "adamw";
    metadata.slots = {"exp_avg", "exp_avg_sq"};
  }
  NewCheckpoint& add(const std::string& kind, const std::string& name, const std::vector<float>& values,
                     zr_dtype dtype = ZR_F32, std::vector<int64_t> shape = {}) {
    if (shape.empty()) shape = {std::ssize(values)};
    return add_bytes(kind, name, host::checkpoint::safetensors_name(dtype), std::move(shape), bytes_of(values, dtype));
  }
  NewCheckpoint& add_bytes(const std::string& kind, const std::string& name, const std::string& dtype,
                           std::vector<int64_t> shape, std::string bytes) {
    data_.push_back(std::move(bytes));
    contents_.slabs.push_back(
        {static_cast<uint32_t>(contents_.tensors.size()), 0, std::ssize(data_.back()), data_.back().data(), {}});
    contents_.tensors.push_back({kind, name, dtype, std::move(shape), {}});
    return *this;
  }
  /// Weight and states of a parameter: `from`, from + 1, ...; the states begin at from + 1000 and from + 2000.
  NewCheckpoint& add_parameter(const std::string& name, int64_t count, float from) {
    return add("weight", name, ramp(count, from))
        .add("state.exp_avg", name, ramp(count, from + 1000))
        .add("state.exp_avg_sq", name, ramp(count, from + 2000));
  }
  host::checkpoint::Checkpoint open() {
    contents_.run = "one-rank";
    contents_.metadata_json = to_text(metadata);
    return host::checkpoint::Checkpoint(
        host::checkpoint::save(scratch_.path("saved"), contents_, host::checkpoint::single_rank_comm(), {}).folder);
  }
  host::checkpoint::CheckpointMetadata metadata;

 private:
  const test::Scratch scratch_;
  host::checkpoint::CheckpointContents contents_;
  std::deque<std::string> data_;
};

/// A job on "a" (40 elements) and "b" (8), and the buffer "statistics" of 3 floats; `change` changes the model first.
struct LoadingJob {
  explicit LoadingJob(const std::vector<std::string>& overrides = {},
                      const std::function<void(FakeModel&)>& change = {}, int64_t count = 40)
      : model({{"a", count}, {"b", 8}}),
        job((change ? change(model) : void(),
             one_rank_setup(scratch.folder().string(), overrides, std::make_shared<OneRankControl>())),
            model, nullptr) {}
  std::vector<float> read(uint32_t param, host::state::LogicalTensor kind = host::state::LogicalTensor::value,
                          const std::string& slot = "") {
    return full_tensor(state, model, param, kind, slot);
  }
  /// The weights of a 16-bit job.
  std::vector<float> weights(uint32_t param, zr_dtype dtype) const {
    std::vector<float> values(static_cast<std::size_t>(model.parameters()[param].count));
    host::update::upcast(model.memory[param], dtype, std::ssize(values), values.data());
    return values;
  }
  host::engine::CheckpointLoader loader(const host::checkpoint::Checkpoint& from,
                                        const host::engine::CheckpointLoadOptions& options,
                                        const host::engine::ParameterChange* change = nullptr) {
    return host::engine::CheckpointLoader(job.context, {state, buffers}, from, options, change);
  }
  /// Checks and reads the checkpoint.
  host::engine::CheckpointLoadReport load(const host::checkpoint::Checkpoint& from,
                                          const host::engine::CheckpointLoadOptions& options = {},
                                          const host::engine::ParameterChange* change = nullptr) {
    host::engine::CheckpointLoader all = loader(from, options, change);
    all.check();
    all.read();
    return all.report();
  }
  const test::Scratch scratch;
  FakeModel model;
  host::job::StartedJob job;
  host::state::ShardedState state{job.context, job.host, job.plugins.tiers, nullptr};
  host::engine::ModelBuffers buffers{model, job.config().train().buffers};
};

/// The checkpoint that fits LoadingJob.
inline NewCheckpoint& fill(NewCheckpoint& saved) {
  return saved.add_parameter("a", 40, 100).add_parameter("b", 8, 500).add("buffer", "statistics", {7, 8, 9});
}

}  // namespace zr::testing
