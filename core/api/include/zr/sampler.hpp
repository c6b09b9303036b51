// zr::MicroBatchSampler: chooses the samples of each micro-batch for a torch::data::DataLoader.
#pragma once

#include <torch/data/samplers/base.h>

#include <array>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include "zr/engine.hpp"

namespace zr {

/// Distributes shuffled epochs of a dataset over the micro-batches of all ranks. The samples of a step depend only on
/// the seed, the size of the dataset and the number of samples before the step: they are the same for any number of
/// ranks and accumulation with the same global batch, and a resumed run continues with the samples that the saved one
/// would have read. Epochs follow each other without end; leave the loop when engine.done().
///
///     auto loader = torch::data::make_data_loader(dataset, zr::MicroBatchSampler(engine, size), engine.micro_batch());
///     for (auto& batch : *loader) { ...; engine.backward(loss); if (engine.step() && engine.done()) break; }
///
/// The DataLoader may ask for micro-batches ahead of training. It calls reset() where its iteration begins; begin a new
/// iteration after engine.load() or engine.set_accumulation(), and after a backward() or step() that threw. One thread
/// at a time. The engine must outlive the sampler.
class MicroBatchSampler : public torch::data::samplers::Sampler<> {
 public:
  /// Begins at the engine's next micro-batch. Throws UserError if `size`, the number of samples of the dataset, is 0.
  MicroBatchSampler(const Engine& engine, std::size_t size);
  /// Begins again at the engine's next micro-batch, with another size of the dataset if one is given. Throws UserError,
  /// without effect, if it is 0.
  void reset(std::optional<std::size_t> size = std::nullopt) override;
  /// The samples of this rank's next micro-batch. Throws UserError if `count` is not engine.micro_batch().
  std::optional<std::vector<std::size_t>> next(std::size_t count) override;
  /// Does nothing: the position follows from the engine's checkpoint.
  void save(torch::serialize::OutputArchive& archive) const override;
  /// Does nothing, like save().
  void load(torch::serialize::InputArchive& archive) override;

 private:
  const std::vector<int64_t>& permutation(int64_t epoch);
  const Engine* engine_;
  std::size_t size_;
  int64_t samples_ = 0;  // of all ranks, in the steps before reset()
  int64_t accumulation_ = 1;
  int64_t micro_ = 0;                                               // this rank's micro-batches since that step began
  std::array<std::pair<int64_t, std::vector<int64_t>>, 2> epochs_;  // number, order of its samples
};

}  // namespace zr
