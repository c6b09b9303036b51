// The model's buffers, such as the running statistics of BatchNorm: each rank has its own during training, and
// train.buffers declares their values wherever the model counts as one.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/comm_runtime.hpp"
#include "config/config.hpp"
#include "model/model.hpp"

namespace zr::host {

/// train.buffers: rank 0's values, the mean over ranks (floating-point buffers; integer ones are rank 0's), or each
/// rank's own.
enum class BufferRule { rank0, mean, per_rank };
/// As train.buffers has it.
BufferRule buffer_rule(const JobConfig& config);

/// The mean, in rank order, of a buffer of `bytes` on each of `ranks` ranks; read(r, to) copies rank r's bytes. F16,
/// BF16, F32 and F64 are added in fp64 and rounded once; a buffer of another type, or whose bytes are equal on all
/// ranks, is rank 0's. Returns the bytes.
std::string mean_of_ranks(const std::string& dtype, int64_t bytes, int ranks,
                          const std::function<void(int rank, void* to)>& read);

/// Training thread only. Collective methods are called by all ranks alike and communicate only if the model has buffers
/// and there are several ranks.
class ModelBuffers {
 public:
  ModelBuffers(Model& model, BufferRule rule) : model_(model), rule_(rule) {}

  BufferRule rule() const { return rule_; }
  /// This rank's own buffers in the model's order: the model's memory, or the copies that are kept during an
  /// evaluation.
  std::vector<ModelBuffer> own();
  /// For each buffer, whether its bytes differ between ranks. The same on all ranks. Collective.
  std::vector<char> differing(CommRuntime& comm);
  /// The bytes that the rule declares for the buffers marked in `differing`; the others stay empty. Collective.
  std::vector<std::string> declared(CommRuntime& comm, const std::vector<char>& differing);

  /// Keeps this rank's own values and gives the model the declared ones, until end_evaluation(); evaluations may be
  /// nested. Collective.
  void begin_evaluation(CommRuntime& comm);
  /// Gives the model this rank's own values back, bit for bit, at the end of the outermost evaluation. Not collective.
  void end_evaluation() noexcept;
  /// After own() was written to: the model of an evaluation gets the values declared now. Collective.
  void refresh(CommRuntime& comm);
  bool in_evaluation() const { return depth_ > 0; }

 private:
  void apply(CommRuntime& comm);
  Model& model_;
  BufferRule rule_;
  int depth_ = 0;                  // of evaluations
  std::vector<std::string> kept_;  // this rank's own bytes during an evaluation
};

}  // namespace zr::host
