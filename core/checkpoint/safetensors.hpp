// Headers of safetensors files: validates what it reads, and writes.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/file.hpp"
#include "zr/abi/base.h"

namespace zr::host::checkpoint {

/// A tensor of a file: bytes [begin, end) of the file's data, which begins after the header.
struct StoredTensor {
  std::string name, dtype;  // "F32"
  std::vector<int64_t> shape;
  int64_t begin = 0, end = 0;
};

struct TensorHeader {
  std::vector<StoredTensor> tensors;  // sorted by begin
  std::map<std::string, std::string> metadata;
  int64_t data = 0;  // offset of the first data byte in the file
};

/// Maximal size of a header; the reference implementation of the format has the same limit.
inline constexpr int64_t kMaxHeaderBytes = 100'000'000;
/// Size of an element of this dtype in bytes; 0 if the dtype is not supported.
int64_t stored_size(std::string_view dtype);
/// The name of a dtype in safetensors files: "F32". `dtype` is not ZR_NONE.
std::string safetensors_name(zr_dtype dtype);
/// The dtype with this name if weights can have it (fp32, bf16, fp16); otherwise ZR_NONE.
zr_dtype safetensors_float(std::string_view dtype);

/// Parses the header `text` (the JSON without the length) of a file of `bytes` bytes whose data begins at `data`. The
/// tensors must fill the data without gaps or overlaps, and their lengths must match their shapes. Throws UserError
/// naming file, tensor and offset.
TensorHeader parse_header(const std::string& file, const std::string& text, int64_t data, int64_t bytes);
/// Reads and parses the header of a file. Throws EnvironmentError if the file cannot be read.
TensorHeader read_header(const File& file);
TensorHeader read_header(const std::string& file);
/// Returns the first bytes of the file: length and JSON, padded so that the data begins at a multiple of 64. Sets
/// header.data.
std::string write_header(TensorHeader& header);
/// Returns a model.safetensors.index.json. `bytes`: the size of all tensors; `files`: tensor names and their files.
std::string write_index(int64_t bytes, const std::vector<std::pair<std::string, std::string>>& files);

}  // namespace zr::host::checkpoint
