#include "checkpoint/safetensors.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/round_up.hpp"
#include "base/text.hpp"
#include "checkpoint/json.hpp"

namespace zr::host::checkpoint {

using Json = nlohmann::json;

namespace {
constexpr int64_t kAlignment = 64;

[[noreturn]] void reject_file(const std::string& file, const std::string& why) {
  fail_user(printable(fmt::format("{}: is not a safetensors file: {}", file, why)) +
            "; name a safetensors file, for example model.safetensors");
}

StoredTensor tensor_of(const std::string& file, const std::string& name, const Json& entry) {
  StoredTensor tensor{name, {}, {}, 0, 0};
  try {
    tensor.dtype = entry.at("dtype").get<std::string>();
    const auto shape = shape_of(entry.at("shape"));
    const Json& offsets = entry.at("data_offsets");
    if (!shape) reject_file(file, fmt::format("invalid shape for '{}'", name));
    tensor.shape = *shape;
    const auto begin = json_integer(offsets.at(0)), end = json_integer(offsets.at(1));
    if (offsets.size() != 2 || !begin || !end)
      reject_file(file, fmt::format("the data_offsets of '{}' are not two valid offsets", name));
    tensor.begin = *begin;
    tensor.end = *end;
  } catch (const Json::exception&) {
    reject_file(file, fmt::format("its header lacks dtype, shape or data_offsets for '{}'", name));
  }
  const int64_t size = stored_size(tensor.dtype);
  if (size == 0) reject_file(file, fmt::format("'{}' has the dtype '{}', which is not supported", name, tensor.dtype));
  int64_t bytes = size;
  for (const int64_t n : tensor.shape)
    if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes))
      reject_file(file, fmt::format("invalid shape for '{}'", name));
  if (tensor.end - tensor.begin != bytes)
    reject_file(file, fmt::format("'{}' needs {} bytes for its shape, but its data_offsets are {} to {}", name, bytes,
                                  tensor.begin, tensor.end));
  return tensor;
}

struct StoredDtype {
  std::string_view name;
  int64_t bytes;
  zr_dtype dtype;  // ZR_NONE: Zeroth stores and copies it, but does not compute with it
};
constexpr StoredDtype kDtypes[]{
    {"F32", 4, ZR_F32},   {"BF16", 2, ZR_BF16},    {"F16", 2, ZR_F16},      {"F64", 8, ZR_F64},
    {"I8", 1, ZR_I8},     {"U8", 1, ZR_U8},        {"I32", 4, ZR_I32},      {"I64", 8, ZR_I64},
    {"BOOL", 1, ZR_NONE}, {"F8_E5M2", 1, ZR_NONE}, {"F8_E4M3", 1, ZR_NONE}, {"I16", 2, ZR_NONE},
    {"U16", 2, ZR_NONE},  {"U32", 4, ZR_NONE},     {"U64", 8, ZR_NONE},     {"C64", 8, ZR_NONE}};

constexpr bool same_sizes() {
  for (const StoredDtype& entry : kDtypes)
    if (entry.dtype != ZR_NONE && entry.bytes != size_of(entry.dtype)) return false;
  return true;
}
static_assert(same_sizes());
}  // namespace

int64_t stored_size(std::string_view dtype) {
  for (const StoredDtype& entry : kDtypes)
    if (entry.name == dtype) return entry.bytes;
  return 0;
}

std::string safetensors_name(zr_dtype dtype) {
  for (const StoredDtype& entry : kDtypes)
    if (entry.dtype == dtype && dtype != ZR_NONE) return std::string(entry.name);
  fail_internal("safetensors files have no dtype " + std::to_string(dtype));
}

zr_dtype safetensors_float(std::string_view dtype) {
  for (const zr_dtype candidate : {ZR_F32, ZR_BF16, ZR_F16})
    if (safetensors_name(candidate) == dtype) return candidate;
  return ZR_NONE;
}

TensorHeader parse_header(const std::string& file, const std::string& text, int64_t data, int64_t bytes) {
  TensorHeader header;
  header.data = data;
  std::optional<std::string> twice;
  const bool object = for_each_member(text, twice, [&](const std::string& name, const Json& entry) {
    if (name != "__metadata__") {
      header.tensors.push_back(tensor_of(file, name, entry));
      return;
    }
    if (!entry.is_object()) reject_file(file, "its __metadata__ is not a JSON object");
    for (const auto& [key, value] : entry.items())
      if (value.is_string()) header.metadata[key] = value.get<std::string>();
  });
  if (!object) reject_file(file, "its header is not a JSON object");
  if (twice) reject_file(file, fmt::format("its header has '{}' twice", *twice));
  const auto before = [](const StoredTensor& a, const StoredTensor& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  };
  if (!std::is_sorted(header.tensors.begin(), header.tensors.end(), before))  // true for most files
    std::stable_sort(header.tensors.begin(), header.tensors.end(), before);
  int64_t at = 0;
  for (const StoredTensor& tensor : header.tensors) {
    if (tensor.begin != at)
      reject_file(file, fmt::format("'{}' begins at byte {}, but the tensors before it end at byte {}", tensor.name,
                                    tensor.begin, at));
    at = tensor.end;
  }
  if (at != bytes - data)
    reject_file(file, fmt::format("its tensors end at byte {}, but the file has {} bytes",
                                  static_cast<uint64_t>(data) + static_cast<uint64_t>(at), bytes));
  return header;
}

TensorHeader read_header(const File& file) {
  const int64_t bytes = file.size();
  unsigned char word[8] = {};
  if (bytes >= 8) file.read(0, word, 8);
  uint64_t length = 0;
  for (int i = 8; i-- > 0;) length = length << 8 | word[i];
  if (bytes < 8 || length > kMaxHeaderBytes || static_cast<int64_t>(length) + 8 > bytes)
    reject_file(file.path(), "its first eight bytes are not the length of a header");
  std::string text(length, '\0');
  file.read(8, text.data(), static_cast<int64_t>(length));
  return parse_header(file.path(), text, static_cast<int64_t>(length) + 8, bytes);
}

TensorHeader read_header(const std::string& file) {
  if (!path_exists(file))
    fail_user(printable(file) + ": cannot be read: No such file or directory; name a safetensors file");
  return read_header(File(file, File::Mode::read_following_links));
}

std::string write_header(TensorHeader& header) {
  // Adds members as text, because an ordered JSON object searches all its members on each insertion.
  std::string text = "{";
  const auto add = [&](const std::string& name, const nlohmann::ordered_json& value) {
    text += fmt::format("{}{}:{}", text.size() > 1 ? "," : "", Json(name).dump(), value.dump());
  };
  if (!header.metadata.empty()) add("__metadata__", header.metadata);
  for (const StoredTensor& tensor : header.tensors)
    add(tensor.name, {{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, tensor.end}}});
  text += "}";
  text.resize(round_up(text.size() + 8, kAlignment) - 8, ' ');
  std::string bytes;
  for (int i = 0; i < 8; ++i) bytes.push_back(static_cast<char>(text.size() >> (8 * i)));
  header.data = static_cast<int64_t>(text.size()) + 8;
  return bytes + text;
}

std::string write_index(int64_t bytes, const std::vector<std::pair<std::string, std::string>>& files) {
  std::string text = fmt::format("{{\n \"metadata\": {{\n  \"total_size\": {}\n }},\n \"weight_map\": {{", bytes);
  for (std::size_t i = 0; i < files.size(); ++i)
    text += fmt::format("{}{}: {}", i ? ",\n  " : "\n  ", Json(files[i].first).dump(), Json(files[i].second).dump());
  return text + (files.empty() ? "}\n}\n" : "\n }\n}\n");
}

}  // namespace zr::host::checkpoint
