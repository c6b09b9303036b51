#include "zr/sampler.hpp"

#include <ATen/CPUGeneratorImpl.h>

#include "base/error.hpp"

namespace zr {

MicroBatchSampler::MicroBatchSampler(const Engine& engine, std::size_t size) : engine_(&engine), size_(size) {
  reset({});
}

void MicroBatchSampler::reset(std::optional<std::size_t> size) {
  const std::size_t new_size = size.value_or(size_);
  if (new_size == 0) host::fail_user("zr::MicroBatchSampler: the dataset is empty; pass its number of samples");
  samples_ = engine_->samples();
  size_ = new_size;
  accumulation_ = engine_->accumulation();
  micro_ = engine_->micro_index() / engine_->world();
  for (auto& [epoch, order] : epochs_) epoch = -1;
}

const std::vector<int64_t>& MicroBatchSampler::permutation(int64_t epoch) {
  auto& [number, order] = epochs_[static_cast<std::size_t>(epoch % 2)];  // a micro-batch may reach into the next epoch
  if (number != epoch) {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<uint64_t>(engine_->seed()) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(epoch));
    const torch::Tensor shuffled = torch::randperm(static_cast<int64_t>(size_), generator, torch::kLong);
    order.assign(shuffled.data_ptr<int64_t>(), shuffled.data_ptr<int64_t>() + shuffled.numel());
    number = epoch;
  }
  return order;
}

std::optional<std::vector<std::size_t>> MicroBatchSampler::next(std::size_t count) {
  const int64_t batch = engine_->micro_batch(), ranks = engine_->world(), size = static_cast<int64_t>(size_);
  if (static_cast<int64_t>(count) != batch)
    host::fail_user("zr::MicroBatchSampler: the data loader asks for " + std::to_string(count) +
                    " samples, but train.micro_batch is " + std::to_string(batch) +
                    "; give the data loader the batch size engine.micro_batch()");
  const int64_t step = micro_ / accumulation_, micro = micro_ % accumulation_;
  const int64_t first = samples_ + (step * accumulation_ * ranks + micro * ranks + engine_->rank()) * batch;
  ++micro_;
  std::vector<std::size_t> samples;
  for (int64_t at = first; at < first + batch; ++at)
    samples.push_back(static_cast<std::size_t>(permutation(at / size)[static_cast<std::size_t>(at % size)]));
  return samples;
}

void MicroBatchSampler::save(torch::serialize::OutputArchive&) const {}
void MicroBatchSampler::load(torch::serialize::InputArchive&) {}

}  // namespace zr
