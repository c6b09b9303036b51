// The private states of steps with local gradients in checkpoints.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "base/round_up.hpp"
#include "checkpoint/safetensors.hpp"
#include "engine/local_gradients.hpp"

namespace zr::host::engine {

namespace {
std::string saved_kind(const std::string& slot) { return checkpoint::kLocalState + slot; }
}  // namespace

std::vector<int64_t> LocalGradients::saved_shape(const Array& array, uint32_t param) const {
  std::vector<int64_t> shape = context_.plan.input.parameters[param].shape;
  if (array.all()) shape.insert(shape.begin(), context_.world());
  return shape;
}

void LocalGradients::add_slabs(const Array& array, uint32_t param, checkpoint::CheckpointContents& contents) const {
  const auto index = static_cast<uint32_t>(contents.tensors.size());
  const zr_view values = view(array, param);
  const int64_t bytes = values.count * int64_t{sizeof(float)};
  if (array.all()) {
    contents.slabs.push_back({index, context_.rank() * bytes, bytes, values.data, {}});
    return;
  }
  const float* from = static_cast<const float*>(values.data);
  for (const plan::ServedRange& range : plan_.ranges[param]) {
    if (range.rank != context_.rank()) continue;
    contents.slabs.push_back(
        {index, range.first * int64_t{sizeof(float)}, range.count * int64_t{sizeof(float)}, from, {}});
    from += range.count;
  }
}

void LocalGradients::add_to(checkpoint::CheckpointContents& contents) const {
  for (uint32_t param = 0; param < begun_.size(); ++param) {
    const plan::Parameter& p = context_.plan.input.parameters[param];
    if (p.frozen || p.count == 0) continue;
    for (const Array& array : private_) {
      if (!begun_[param]) {
        contents.later_bytes += round_up(view(array, param).count * int64_t{sizeof(float)} +
                                             checkpoint::CheckpointContents::kAlignment * std::ssize(ranges_[param]),
                                         checkpoint::CheckpointContents::kAlignment);
        continue;
      }
      add_slabs(array, param, contents);
      contents.tensors.push_back(
          {saved_kind(array.slot), p.name, checkpoint::safetensors_name(ZR_F32), saved_shape(array, param), {}});
    }
  }
}

void LocalGradients::read_saved(const Array& array, uint32_t param, const checkpoint::Checkpoint& from,
                                const checkpoint::SavedTensor& saved) {
  const zr_view values = view(array, param);
  const int64_t bytes = values.count * int64_t{sizeof(float)};
  if (array.all()) return from.read(saved, context_.rank() * bytes, bytes, values.data);
  char* to = static_cast<char*>(values.data);
  for (const plan::ServedRange& range : plan_.ranges[param]) {
    if (range.rank != context_.rank()) continue;
    const int64_t size = range.count * int64_t{sizeof(float)};
    from.read(saved, range.first * int64_t{sizeof(float)}, size, to);
    to += size;
  }
}

std::string LocalGradients::restore(const checkpoint::Checkpoint& from, int64_t saved_world,
                                    const std::vector<std::pair<uint32_t, std::string>>& names) {
  std::vector<std::string> lost;
  for (const auto& [param, name] : names) {
    if (!api_ || context_.plan.input.parameters[param].frozen) continue;
    std::vector<const checkpoint::SavedTensor*> found;
    for (const Array& array : private_) {
      const checkpoint::SavedTensor* saved = from.find(saved_kind(array.slot), name);
      if (!saved || saved->dtype != checkpoint::safetensors_name(ZR_F32)) continue;
      const std::string text = fmt::format("'{}'", array.slot);
      if (saved_world != context_.world()) {
        if (std::ranges::find(lost, text) == lost.end()) lost.push_back(text);
      } else if (saved->shape == saved_shape(array, param)) {
        found.push_back(saved);
      }
    }
    if (found.size() != private_.size()) continue;
    try {
      memory_.allocate_own();
    } catch (...) {
      memory_.free_own();  // the ranks of a host free what they share together
      throw;
    }
    for (std::size_t i = 0; i < found.size(); ++i) read_saved(private_[i], param, from, *found[i]);
    begun_[param] = 1;
  }
  return fmt::format("{}", fmt::join(lost, ", "));
}

}  // namespace zr::host::engine
