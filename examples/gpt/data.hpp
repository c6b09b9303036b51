// Training and validation batches of the bytes of one text.
#pragma once

#include <torch/types.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpt {

struct Batch {
  torch::Tensor bytes, next;  // int64 [samples, context]; next[i] is the byte after bytes[i]
  Batch to(torch::Device device) const { return {bytes.to(device), next.to(device)}; }
};

/// The first 95 % of the text is for training, the rest for validation. Immutable.
class Text {
 public:
  /// Reads a plain or gzipped file of at most 4 GiB of text. Throws std::invalid_argument with file and remedy.
  explicit Text(const std::string& file);

  /// Micro-batch m of a step. It depends only on the arguments, so ranks and accumulation do not change the training
  /// data.
  Batch training(int64_t seed, int64_t step, int64_t m, int64_t samples, int64_t context) const;

  /// Fixed adjacent windows, in chunks of kChunk samples.
  static constexpr int64_t kChunk = 32;
  int64_t validation_chunks(int64_t context) const;
  Batch validation(int64_t chunk, int64_t context) const;

  size_t size() const { return bytes_.size(); }

 private:
  Batch gather(const std::vector<int64_t>& starts, int64_t context) const;

  std::string file_, bytes_;
  int64_t split_ = 0;  // first byte of validation
};

}  // namespace gpt
