#include "data.hpp"

#include <sys/stat.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <vector>

namespace gpt {
namespace {

// Sebastiano Vigna's splitmix64 finaliser: a counter-based generator has no state to save or restore.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

constexpr size_t kMaxBytes = size_t{4} << 30;       // every rank holds the text
constexpr size_t kCheckedBytes = size_t{64} << 20;  // of text, from which on the ratio is checked
constexpr size_t kMaxRatio = 100;

[[noreturn]] void fail_reading(const std::string& file, const std::string& why) {
  throw std::invalid_argument("data.text: " + file + ": " + why +
                              "\n  remedy: name a plain or .gz file of your own (data.text=FILE); in the source tree, "
                              "`make setup` fetches the default text");
}

}  // namespace

Text::Text(const std::string& file) : file_(file) {
  struct stat status {};
  if (::stat(file.c_str(), &status) != 0) {
    fail_reading(file, std::strerror(errno));
  }
  if (!S_ISREG(status.st_mode)) {  // a pipe could block, a device may never end
    fail_reading(file,
                 S_ISDIR(status.st_mode) ? "is a folder, not a file" : "is a pipe or a device, not a regular file");
  }
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> in(gzopen(file.c_str(), "rb"), gzclose);  // plain files pass through
  if (!in) {
    fail_reading(file, std::strerror(errno));
  }
  std::vector<char> block(1 << 20);
  int n = 0;
  const auto start = std::chrono::steady_clock::now();
  bool reported = false;
  while ((n = gzread(in.get(), block.data(), static_cast<unsigned>(block.size()))) > 0) {
    bytes_.append(block.data(), static_cast<size_t>(n));
    if (bytes_.size() > kMaxBytes) {
      fail_reading(file, "has more than 4 GiB of text, the limit of this example");
    }
    // Text shrinks to a fifth, and by a hundred only if it is not text: such a file may never end.
    const auto read = static_cast<size_t>(std::max<z_off_t>(gzoffset(in.get()), 1));
    if (bytes_.size() > kCheckedBytes && bytes_.size() / read > kMaxRatio) {
      fail_reading(file, "its gzip data grows to more than 100 times its size, so it is not text");
    }
    if (!reported && std::chrono::steady_clock::now() - start > std::chrono::seconds(2)) {
      std::cerr << "reading data.text: " << file << ": " << (bytes_.size() >> 20) << " MiB so far" << std::endl;
      reported = true;
    }
  }
  int code = Z_OK;
  gzerror(in.get(), &code);  // gzread() reports no error for a truncated file
  if (n < 0 || code != Z_OK) {
    fail_reading(file, code == Z_ERRNO ? std::strerror(errno) : "its gzip data is damaged or cut off");
  }
  split_ = static_cast<int64_t>(bytes_.size()) / 20 * 19;
}

Batch Text::training(int64_t seed, int64_t step, int64_t m, int64_t samples, int64_t context) const {
  const auto choices = split_ - context;
  if (choices < 1) {
    fail_reading(file_, "holds " + std::to_string(bytes_.size()) +
                            " bytes, too few for model.context = " + std::to_string(context));
  }
  uint64_t key = mix(static_cast<uint64_t>(seed));
  key = mix(key ^ static_cast<uint64_t>(step));
  key = mix(key ^ static_cast<uint64_t>(m));
  std::vector<int64_t> starts(static_cast<size_t>(samples));
  for (size_t i = 0; i < starts.size(); ++i) {
    starts[i] = static_cast<int64_t>(mix(key + i) % static_cast<uint64_t>(choices));
  }
  return gather(starts, context);
}

int64_t Text::validation_chunks(int64_t context) const {
  const auto chunks = (static_cast<int64_t>(bytes_.size()) - split_ - 1) / (context * kChunk);
  if (chunks < 1) {
    fail_reading(file_, "holds " + std::to_string(bytes_.size()) + " bytes; the last twentieth is too small for " +
                            std::to_string(kChunk) +
                            " validation samples of model.context = " + std::to_string(context));
  }
  return chunks;
}

Batch Text::validation(int64_t chunk, int64_t context) const {
  std::vector<int64_t> starts(kChunk);
  for (int64_t i = 0; i < kChunk; ++i) {
    starts[static_cast<size_t>(i)] = split_ + (chunk * kChunk + i) * context;
  }
  return gather(starts, context);
}

Batch Text::gather(const std::vector<int64_t>& starts, int64_t context) const {
  const auto samples = static_cast<int64_t>(starts.size());
  Batch batch{torch::empty({samples, context}, torch::kLong), torch::empty({samples, context}, torch::kLong)};
  auto* bytes = batch.bytes.data_ptr<int64_t>();
  auto* next = batch.next.data_ptr<int64_t>();
  for (const auto start : starts) {
    const auto* from = reinterpret_cast<const unsigned char*>(bytes_.data()) + start;
    bytes = std::copy(from, from + context, bytes);
    next = std::copy(from + 1, from + context + 1, next);
  }
  return batch;
}

}  // namespace gpt
