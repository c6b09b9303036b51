#include "engine/model_buffers.hpp"

#include <algorithm>
#include <cstring>

#include "base/log.hpp"
#include "checkpoint/manifest.hpp"
#include "checkpoint/safetensors.hpp"
#include "update/cast.hpp"

namespace zr::host::engine {

std::string mean_of_ranks(const std::string& dtype, int64_t bytes_each, int ranks,
                          const std::function<void(int rank, void* to)>& read) {
  std::string first(static_cast<std::size_t>(bytes_each), '\0');
  read(0, first.data());
  const zr_dtype narrow_type = checkpoint::safetensors_float(dtype);
  if (narrow_type == ZR_NONE && dtype != "F64") return first;
  const int64_t count = bytes_each / checkpoint::stored_size(dtype);
  const auto n = static_cast<std::size_t>(count);
  bool equal = true;
  std::vector<double> sum(n, 0.0);
  std::vector<float> wide(n);
  std::string bytes = first;
  for (int r = 0; r < ranks; ++r) {
    if (r > 0) read(r, bytes.data());
    equal &= bytes == first;
    if (dtype == "F64") {
      for (std::size_t i = 0; i < n; ++i) {
        double value = 0;
        std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
        sum[i] += value;
      }
    } else {
      update::upcast(bytes.data(), narrow_type, count, wide.data());
      for (std::size_t i = 0; i < n; ++i) sum[i] += static_cast<double>(wide[i]);
    }
  }
  if (equal) return first;  // bit for bit, without the rounding of a mean
  for (double& value : sum) value /= ranks;
  if (dtype == "F64") {
    std::memcpy(bytes.data(), sum.data(), bytes.size());
  } else {
    std::transform(sum.begin(), sum.end(), wide.begin(), [](double value) { return static_cast<float>(value); });
    update::downcast(wide.data(), count, narrow_type, bytes.data());
  }
  return bytes;
}

std::vector<model::ModelBuffer> ModelBuffers::own_buffers() {
  std::vector<model::ModelBuffer> buffers = source_.buffers();
  if (depth_ > 0)
    for (std::size_t i = 0; i < buffers.size(); ++i) buffers[i].data = own_values_[i].data();
  return buffers;
}

std::vector<char> ModelBuffers::differing(comm::CommRuntime& comm) {
  const std::vector<model::ModelBuffer> buffers = own_buffers();
  std::vector<char> differ(buffers.size(), 0);
  if (buffers.empty() || comm.world() == 1) return differ;
  std::string hashes;
  for (const model::ModelBuffer& buffer : buffers) {
    const uint64_t hash = checkpoint::hash_of(buffer.data, buffer.bytes);
    hashes.append(reinterpret_cast<const char*>(&hash), sizeof hash);
  }
  const std::vector<std::string> rank_hashes = comm.all_gather_bytes(hashes, "hashes of buffers");
  for (const std::string& other : rank_hashes)
    for (std::size_t i = 0; i < differ.size(); ++i)
      differ[i] |= other.compare(i * sizeof(uint64_t), sizeof(uint64_t), rank_hashes[0], i * sizeof(uint64_t),
                                 sizeof(uint64_t)) != 0;
  return differ;
}

std::vector<std::string> ModelBuffers::declared(comm::CommRuntime& comm, const std::vector<char>& differing) {
  const std::vector<model::ModelBuffer> buffers = own_buffers();
  std::vector<std::string> values(buffers.size());
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    if (!differing[i]) continue;
    const model::ModelBuffer& buffer = buffers[i];
    const std::string own_bytes(static_cast<const char*>(buffer.data), static_cast<std::size_t>(buffer.bytes));
    if (rule_ == config::BufferRule::per_rank) {
      values[i] = own_bytes;
    } else if (rule_ == config::BufferRule::rank0) {
      values[i] = comm.broadcast_bytes(own_bytes, 0, "rank 0's buffers");
    } else {
      const std::vector<std::string> rank_bytes = comm.all_gather_bytes(own_bytes, "buffers of all ranks");
      values[i] = mean_of_ranks(buffer.dtype, buffer.bytes, comm.world(), [&](int r, void* to) {
        const std::string& of = rank_bytes[static_cast<std::size_t>(r)];
        std::memcpy(to, of.data(), of.size());
      });
    }
  }
  return values;
}

void ModelBuffers::apply(comm::CommRuntime& comm) {
  const std::vector<std::string> values = declared(comm, differing(comm));
  const std::vector<model::ModelBuffer> buffers = source_.buffers();
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const std::string& value = values[i].empty() ? own_values_[i] : values[i];
    std::memcpy(buffers[i].data, value.data(), value.size());
  }
  source_.write_buffers();
}

void ModelBuffers::begin_evaluation(comm::CommRuntime& comm) {
  if (++depth_ > 1) return;
  own_values_.clear();
  for (const model::ModelBuffer& buffer : source_.buffers())
    own_values_.emplace_back(static_cast<const char*>(buffer.data), static_cast<std::size_t>(buffer.bytes));
  try {
    apply(comm);
  } catch (...) {
    end_evaluation();
    throw;
  }
}

void ModelBuffers::refresh(comm::CommRuntime& comm) {
  if (depth_ > 0) apply(comm);
}

void ModelBuffers::end_evaluation() noexcept {
  if (depth_ == 0) return;
  if (--depth_ > 0) return;
  log_exception_of([&] {  // of the device that the model is on
    const std::vector<model::ModelBuffer> buffers = source_.buffers();
    for (std::size_t i = 0; i < buffers.size(); ++i)  // set_data() during the evaluation may have made a buffer smaller
      std::memcpy(buffers[i].data, own_values_[i].data(),
                  std::min(own_values_[i].size(), static_cast<std::size_t>(buffers[i].bytes)));
    source_.write_buffers();
  });
  own_values_.clear();
}

}  // namespace zr::host::engine
