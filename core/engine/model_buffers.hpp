// The model's buffers, such as the running statistics of BatchNorm: each rank has its own during training; outside
// training, in evaluation and in files, train.buffers selects their values.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/comm_runtime.hpp"
#include "config/config.hpp"
#include "model/buffer_source.hpp"

namespace zr::host::engine {

/// Returns the bytes of the mean, in rank order, of a buffer of `bytes` bytes on each of `ranks` ranks; read(r, to)
/// copies rank r's bytes. F16, BF16, F32 and F64 are added in fp64 and rounded once. A buffer of another dtype, or
/// whose bytes are equal on all ranks, is rank 0's.
std::string mean_of_ranks(const std::string& dtype, int64_t bytes, int ranks,
                          const std::function<void(int rank, void* to)>& read);

/// Training thread only. All ranks call collective methods in the same order; these communicate only if the model has
/// buffers and there are several ranks.
class ModelBuffers {
 public:
  ModelBuffers(model::BufferSource& source, config::BufferRule rule) : source_(source), rule_(rule) {}

  config::BufferRule rule() const { return rule_; }
  /// This rank's own buffers in the model's order: in the model's memory, or during an evaluation in the saved copies.
  std::vector<model::ModelBuffer> own_buffers();
  /// For each buffer, not 0 if its bytes differ between ranks. The same on all ranks. Collective.
  std::vector<char> differing(comm::CommRuntime& comm);
  /// The bytes that the rule selects for the buffers marked in `differing`; the other strings are empty. Collective.
  std::vector<std::string> declared(comm::CommRuntime& comm, const std::vector<char>& differing);

  /// Saves this rank's own values and sets the model's buffers to the selected ones, until end_evaluation().
  /// Evaluations may be nested. Collective.
  void begin_evaluation(comm::CommRuntime& comm);
  /// Restores this rank's own values, bit for bit, at the end of the outermost evaluation. Not collective.
  void end_evaluation() noexcept;
  /// Call after writing to own_buffers(): during an evaluation, sets the model's buffers to the values now selected.
  /// Collective.
  void refresh(comm::CommRuntime& comm);
  bool in_evaluation() const { return depth_ > 0; }

 private:
  void apply(comm::CommRuntime& comm);
  model::BufferSource& source_;
  config::BufferRule rule_;
  int depth_ = 0;                        // nesting depth of evaluations
  std::vector<std::string> own_values_;  // this rank's own bytes during an evaluation
};

}  // namespace zr::host::engine
