// The contents of a checkpoint: tensors by kind and name, their files and offsets, and a hash for every chunk.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/metadata.hpp"

namespace zr::host::checkpoint {

/// An unsharded tensor; it does not depend on how the tensor is sharded.
struct TensorInfo {
  /// "weight", "buffer", kRankBuffer, "master", or "state.NAME" or "local.NAME" of an optimizer; the manifest calls it
  /// "role".
  std::string kind;
  std::string name;   // name of the parameter or buffer
  std::string dtype;  // as safetensors names it: "F32"
  std::vector<int64_t> shape;
  std::vector<std::string> aliases;  // other names of tied weights
  /// Of a weight: the id of the optimizer that updates it; "": it was not trained. Not in older files.
  std::optional<std::string> optimizer{};
  int64_t bytes() const;
};

/// Maximal length of a tensor's name or kind in bytes.
inline constexpr std::size_t kMaxNameBytes = 4096;

struct Chunk {
  int64_t bytes;
  uint64_t hash;  // XXH3
};

struct SavedTensor : TensorInfo {
  uint32_t file = 0;          // index in Manifest::files
  int64_t offset = 0;         // of its first byte in the file
  std::vector<Chunk> chunks;  // consecutive; they cover the tensor
};

struct SavedFile {
  std::string name;
  int64_t bytes = 0;
  uint64_t header = 0;  // XXH3 of the bytes before the data
  int64_t data = 0;     // offset of the first data byte
};

/// The kind of the values of a buffer on all ranks, if they differ: the rank is an additional first dimension.
inline constexpr const char* kRankBuffer = "buffer.rank";
/// The kinds of states that only steps with local gradients have begin with this. Those of all ranks have the rank as
/// an additional first dimension.
inline constexpr const char* kLocalState = "local.";

struct Manifest {
  int64_t step = 0;             // number of completed steps
  std::string run;              // id of the job that saved it
  std::string metadata_json;    // a JSON object: to_text(CheckpointMetadata)
  CheckpointMetadata metadata;  // the same data; filled by parse_manifest()
  std::vector<SavedFile> files;
  std::vector<SavedTensor> tensors;
  int64_t index_bytes = 0;  // size of the file kIndex
  uint64_t index_hash = 0;
};

inline constexpr const char* kManifest = "manifest.json";
inline constexpr const char* kIndex = "model.safetensors.index.json";

/// Reads a manifest or an index; if the file does not begin with '{', returns only its first byte. Throws UserError
/// if it has more than 256 MiB, EnvironmentError if it cannot be read.
std::string read_json(const std::string& path);

std::string to_text(const Manifest& manifest);  // the contents of manifest.json, including the hash
/// Parses the contents of manifest.json. Throws UserError naming `path` and the error: a changed byte, a value of a
/// wrong type or out of bounds (with its key), byte ranges that overlap or are outside their files, or a file name that
/// is a path.
Manifest parse_manifest(const std::string& path, const std::string& text);

/// Parses a model.safetensors.index.json: the file of each tensor. The files must be names in the same folder. Throws
/// UserError.
std::map<std::string, std::string> parse_index(const std::string& path, const std::string& text);

/// Computes hash_of() incrementally.
class Hash {
 public:
  Hash();
  ~Hash();
  Hash(const Hash&) = delete;
  void add(const void* data, int64_t bytes);  // appends data[bytes]
  uint64_t value() const;

 private:
  void* state_;
};

uint64_t hash_of(const void* data, int64_t bytes);  // XXH3 of data[bytes]

}  // namespace zr::host::checkpoint
