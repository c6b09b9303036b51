// safetensors files: the header, read with suspicion and written.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/file.hpp"

namespace zr::host {

/// A tensor of a file: bytes [begin, end) of the file's data, which stands after the header.
struct StoredTensor {
  std::string name, dtype;  // "F32"
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
};

struct TensorHeader {
  std::vector<StoredTensor> tensors;  // by begin
  std::map<std::string, std::string> metadata;
  int64_t data = 0;  // the file's first byte of data
};

/// Of a header, as the format's own reader has it.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;
/// Bytes of an element of that type; 0: none that is known here.
int64_t stored_size(const std::string& dtype);

/// The header in `text`, the JSON without its length, of a file of `bytes` whose data begins at `data`. Tensors must
/// fill the data without gap or overlap, as long as their shapes say. Throws Failure(user) naming file, tensor and
/// offset.
TensorHeader parse_header(const std::string& file, const std::string& text, int64_t data, int64_t bytes);
/// The same of a file. Throws Failure(environment) where it cannot be read.
TensorHeader read_header(const File& file);
TensorHeader read_header(const std::string& file);
/// The file's first bytes: length and JSON, so that the data begins at a multiple of 64. Fills data.
std::string write_header(TensorHeader& header);
/// A model.safetensors.index.json: bytes of all tensors, then the file of each.
std::string write_index(int64_t bytes, const std::vector<std::pair<std::string, std::string>>& files);

}  // namespace zr::host
