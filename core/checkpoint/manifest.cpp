#include "checkpoint/manifest.hpp"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <set>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/hex.hpp"
#include "base/text.hpp"
#include "checkpoint/json.hpp"
#include "checkpoint/json_field.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host::checkpoint {

using Json = nlohmann::json;

namespace {
constexpr int64_t kVersion = 2;
constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
constexpr int64_t kLargestChunk = int64_t{64} << 20;  // the size of buffer that a reader must allocate
constexpr int64_t kLargestJson = int64_t{256} << 20;
const std::string kBefore = "{\"xxh3\":\"", kBetween = "\",\n\"manifest\":", kAfter = "}\n";

const std::string kManifestRemedy = "; load another checkpoint (`zeroth verify` reports which are intact)";

[[noreturn]] void reject_manifest(const std::string& path, const std::string& why) {
  fail_user(printable(fmt::format("{}: {}", path, why)) + kManifestRemedy);
}

uint64_t hash_in(const JsonField& field) {
  const auto hash = value_from_hex(field.text());
  if (!hash) field.fail("16 hexadecimal digits");
  return *hash;
}

// Whether `name` is a plain name of a safetensors file, without a path.
bool is_plain(const std::string& name) {
  constexpr const char* kLetters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-";
  return !name.empty() && name[0] != '.' && name.find_first_not_of(kLetters) == std::string::npos &&
         name.size() < 200 && name.ends_with(".safetensors");
}

Json json_of(const SavedTensor& tensor) {
  Json chunks = Json::array();
  for (const Chunk& chunk : tensor.chunks) chunks.push_back({chunk.bytes, hex(chunk.hash)});
  Json json{{"role", tensor.kind}, {"name", tensor.name}, {"dtype", tensor.dtype},      {"shape", tensor.shape},
            {"file", tensor.file}, {"at", tensor.offset}, {"chunks", std::move(chunks)}};
  if (!tensor.aliases.empty()) json["aliases"] = tensor.aliases;
  if (tensor.optimizer) json["optimizer"] = *tensor.optimizer;
  return json;
}

SavedTensor tensor_of(const std::string& path, const JsonField& json, const std::vector<SavedFile>& files) {
  SavedTensor tensor;
  tensor.kind = json.at("role").text();
  tensor.name = json.at("name").text();
  if (tensor.kind.size() > kMaxNameBytes || tensor.name.size() > kMaxNameBytes)
    reject_manifest(path, fmt::format("has a tensor whose name or role has more than {} bytes", kMaxNameBytes));
  tensor.dtype = json.at("dtype").text();
  if (json.has("aliases")) tensor.aliases = json.at("aliases").texts();
  if (json.has("optimizer")) tensor.optimizer = json.at("optimizer").text();
  const std::string tensor_text = fmt::format("{} '{}'", tensor.kind, tensor.name);
  const auto shape = shape_of(json.at("shape").value());
  if (!shape) reject_manifest(path, tensor_text + " has an invalid shape");
  tensor.shape = *shape;
  const auto file_index = json_integer(json.at("file").value()), at = json_integer(json.at("at").value());
  if (!file_index || *file_index >= std::ssize(files))
    reject_manifest(path, tensor_text + " is in a file that is not listed");
  tensor.file = static_cast<uint32_t>(*file_index);
  if (!at) reject_manifest(path, fmt::format("{} has an invalid offset in {}", tensor_text, files[tensor.file].name));
  tensor.offset = *at;
  if (stored_size(tensor.dtype) == 0 || tensor.bytes() < 0)
    reject_manifest(path, tensor_text + " has an unknown dtype or an invalid shape");
  const SavedFile& file = files[tensor.file];
  if (tensor.offset < file.data || tensor.offset > file.bytes || tensor.bytes() > file.bytes - tensor.offset)
    reject_manifest(
        path, fmt::format("{} is outside the data of {}: it begins at byte {}", tensor_text, file.name, tensor.offset));
  int64_t remaining = tensor.bytes();
  const JsonField chunks = json.at("chunks");
  for (std::size_t i = 0, n = chunks.size(); i < n; ++i) {
    const JsonField chunk_field = chunks.element(i);
    const Chunk chunk{json_integer(chunk_field.element(0).value()).value_or(0), hash_in(chunk_field.element(1))};
    if (chunk.bytes <= 0 || chunk.bytes > remaining || chunk.bytes > kLargestChunk)
      reject_manifest(path, fmt::format("the chunks of {} do not cover the tensor", tensor_text));
    remaining -= chunk.bytes;
    tensor.chunks.push_back(chunk);
  }
  if (remaining != 0) reject_manifest(path, fmt::format("the chunks of {} do not cover the tensor", tensor_text));
  return tensor;
}

// The tensor must have the dtype of its buffer and one more dimension, the rank.
void check_rank_buffer(const std::string& path, const SavedTensor& ranks, const SavedTensor* buffer) {
  const std::string tensor_text = fmt::format("per-rank buffer '{}'", ranks.name);
  if (!buffer) reject_manifest(path, tensor_text + " is listed without its buffer");
  if (ranks.dtype != buffer->dtype || ranks.shape.empty() || ranks.shape[0] < 1 ||
      !std::equal(ranks.shape.begin() + 1, ranks.shape.end(), buffer->shape.begin(), buffer->shape.end()))
    reject_manifest(path, tensor_text + " does not match the dtype and shape of its buffer");
}

// Every tensor is listed once, tensors do not overlap, and master weights and per-rank buffers match their tensors.
void check(const std::string& path, const Manifest& manifest) {
  std::set<std::pair<std::string, std::string>> names;
  std::map<std::string, const SavedTensor*> weights, buffers;
  for (const SavedTensor& tensor : manifest.tensors) {
    if (tensor.kind == "weight") weights.emplace(tensor.name, &tensor);
    if (tensor.kind == "buffer") buffers.emplace(tensor.name, &tensor);
  }
  std::map<std::pair<uint32_t, int64_t>, const SavedTensor*> offsets;  // by file and offset
  for (const SavedTensor& tensor : manifest.tensors) {
    const auto weight = weights.find(tensor.name);
    if (tensor.kind == "master" && (weight == weights.end() || weight->second->shape != tensor.shape))
      reject_manifest(path, fmt::format("master '{}' does not match the shape of its weight", tensor.name));
    if (const auto buffer = buffers.find(tensor.name); tensor.kind == kRankBuffer)
      check_rank_buffer(path, tensor, buffer == buffers.end() ? nullptr : buffer->second);
    if (!names.emplace(tensor.kind, tensor.name).second)
      reject_manifest(path, fmt::format("{} '{}' is listed twice", tensor.kind, tensor.name));
    if (tensor.bytes() > 0 && !offsets.emplace(std::pair(tensor.file, tensor.offset), &tensor).second)
      reject_manifest(path, fmt::format("{} '{}' overlaps another tensor", tensor.kind, tensor.name));
  }
  for (auto current = offsets.begin(); current != offsets.end(); ++current) {
    const auto next = std::next(current);
    if (next != offsets.end() && next->first.first == current->first.first &&
        next->first.second < current->first.second + current->second->bytes())
      reject_manifest(
          path, fmt::format("{} '{}' overlaps '{}' at byte {} of {}", next->second->kind, next->second->name,
                            current->second->name, next->first.second, manifest.files[current->first.first].name));
  }
}
}  // namespace

int64_t TensorInfo::bytes() const {
  int64_t bytes = stored_size(dtype);
  for (const int64_t n : shape)
    if (n < 0 || __builtin_mul_overflow(bytes, n, &bytes)) return -1;
  return bytes;
}

uint64_t hash_of(const void* data, int64_t bytes) { return XXH3_64bits(data, static_cast<std::size_t>(bytes)); }

Hash::Hash() : state_(XXH3_createState()) { XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_)); }
Hash::~Hash() { XXH3_freeState(static_cast<XXH3_state_t*>(state_)); }
void Hash::add(const void* data, int64_t bytes) {
  XXH3_64bits_update(static_cast<XXH3_state_t*>(state_), data, static_cast<std::size_t>(bytes));
}
uint64_t Hash::value() const { return XXH3_64bits_digest(static_cast<XXH3_state_t*>(state_)); }

std::string to_text(const Manifest& manifest) {
  Json files = Json::array(), tensors = Json::array();
  for (const SavedFile& file : manifest.files)
    files.push_back({{"name", file.name}, {"bytes", file.bytes}, {"header", hex(file.header)}, {"data", file.data}});
  for (const SavedTensor& tensor : manifest.tensors) tensors.push_back(json_of(tensor));
  const Json json{{"version", kVersion},
                  {"step", manifest.step},
                  {"run", manifest.run},
                  {"facts", Json::parse(manifest.metadata_json)},
                  {"files", std::move(files)},
                  {"tensors", std::move(tensors)},
                  {"index", {{"bytes", manifest.index_bytes}, {"xxh3", hex(manifest.index_hash)}}}};
  const std::string body = json.dump();
  return kBefore + hex(hash_of(body.data(), static_cast<int64_t>(body.size()))) + kBetween + body + kAfter;
}

std::string read_json(const std::string& path) {
  const File file(path, File::Mode::read);
  const int64_t size = file.size();
  if (size > kLargestJson)
    reject_manifest(
        path, fmt::format("has {}, but the limit for such a file is {}", bytes_text(size), bytes_text(kLargestJson)));
  std::string text(static_cast<std::size_t>(std::min<int64_t>(size, 1)), '\0');
  file.read(0, text.data(), static_cast<int64_t>(text.size()));
  if (text != "{") return text;
  text.resize(static_cast<std::size_t>(size));
  file.read(0, text.data(), size);
  return text;
}

std::map<std::string, std::string> parse_index(const std::string& path, const std::string& text) {
  const std::string remedy = "; download it again, or name one of the .safetensors files";
  const Json json = is_shallow(text) ? Json::parse(text, nullptr, false) : Json();
  if (!json.is_object() || !json.contains("weight_map") || !json["weight_map"].is_object())
    fail_user(fmt::format("{}: has no weight_map, so it is not an index of safetensors files{}", path, remedy));
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : json["weight_map"].items()) {
    if (!file.is_string() || !is_plain(file.get<std::string>()))
      fail_user(printable(fmt::format("{}: the value for '{}' is not the name of a safetensors file in its folder",
                                      path, tensor)) +
                remedy);
    files[tensor] = file.get<std::string>();
  }
  return files;
}

Manifest parse_manifest(const std::string& path, const std::string& text) {
  const std::size_t first = kBefore.size() + 16 + kBetween.size();
  if (text.size() < first + kAfter.size() || text.compare(0, kBefore.size(), kBefore) != 0 ||
      text.compare(kBefore.size() + 16, kBetween.size(), kBetween) != 0 || !text.ends_with(kAfter))
    reject_manifest(path, "is not a checkpoint manifest, or is truncated");
  const std::string body = text.substr(first, text.size() - first - kAfter.size());
  if (text.compare(kBefore.size(), 16, hex(hash_of(body.data(), static_cast<int64_t>(body.size())))) != 0)
    reject_manifest(path, "was changed since it was written: its hash does not match");
  if (!is_shallow(body)) reject_manifest(path, "is not a checkpoint manifest: its JSON is nested too deeply");
  const Json json = Json::parse(body, nullptr, false);
  if (json.is_discarded()) reject_manifest(path, "is not a checkpoint manifest: it is not valid JSON");
  if (const auto twice = repeated_key(body))
    reject_manifest(path, fmt::format("has the key '{}' twice in one object", *twice));
  const JsonField root(path, kManifestRemedy, json);
  const int64_t version = root.at("version").integer(0, kMax);
  if (version != kVersion)
    fail_user(fmt::format(
        "{}: has format version {}, but this release reads version {}; load it with the release that wrote it", path,
        version, kVersion));
  Manifest manifest;
  manifest.step = root.at("step").integer(0, kMaxSteps);
  manifest.index_bytes = root.at("index").at("bytes").integer(0, kMax);
  manifest.index_hash = hash_in(root.at("index").at("xxh3"));
  manifest.run = root.at("run").text();
  manifest.metadata_json = root.at("facts").value().dump();
  manifest.metadata = parse_metadata(root.at("facts"), manifest.step);
  const JsonField files = root.at("files"), tensors = root.at("tensors");
  for (std::size_t i = 0, n = files.size(); i < n; ++i) {
    const JsonField entry = files.element(i);
    SavedFile file{entry.at("name").text(), entry.at("bytes").integer(0, kMax), hash_in(entry.at("header")),
                   entry.at("data").integer(0, kMax)};
    if (!is_plain(file.name))
      reject_manifest(path, fmt::format("'{}' is not the name of a file in its folder", file.name));
    if (file.data < 8 || file.bytes < file.data || file.data > kMaxHeaderBytes + 8)
      reject_manifest(path, fmt::format("{} has an invalid data offset, {}", file.name, file.data));
    manifest.files.push_back(std::move(file));
  }
  for (std::size_t i = 0, n = tensors.size(); i < n; ++i)
    manifest.tensors.push_back(tensor_of(path, tensors.element(i), manifest.files));
  check(path, manifest);
  return manifest;
}

}  // namespace zr::host::checkpoint
