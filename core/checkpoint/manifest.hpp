// What a checkpoint consists of: tensors by role and name, where each stands, and a hash for every chunk of it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/metadata.hpp"

namespace zr::host {

/// A whole tensor, however it is cut between ranks.
struct TensorInfo {
  std::string role;   // "weight", "buffer", kRankBuffer, "master", or "state.NAME" of an optimizer
  std::string name;   // of the parameter or buffer
  std::string dtype;  // as safetensors names it: "F32"
  std::vector<int64_t> shape;
  std::vector<std::string> aliases;  // other names of tied weights
  int64_t bytes() const;
};

/// Bytes of a tensor's name or role.
inline constexpr std::size_t kMaxNameBytes = 4096;

struct Chunk {
  int64_t bytes;
  uint64_t hash;  // XXH3
};

struct SavedTensor : TensorInfo {
  uint32_t file = 0;          // of Manifest::files
  int64_t at = 0;             // its first byte there
  std::vector<Chunk> chunks;  // one after another, all of it
};

struct SavedFile {
  std::string name;
  int64_t bytes = 0;
  uint64_t header = 0;  // XXH3 of what stands before the data
  int64_t data = 0;     // first byte of data
};

/// The role of a buffer's values on all ranks, where they differ: one more dimension, the rank, before the buffer's
/// own.
inline constexpr const char* kRankBuffer = "buffer.rank";

struct Manifest {
  int64_t step = 0;             // steps made when it was saved
  std::string run;              // of the job that saved it
  std::string metadata_json;    // a JSON object: what is not a tensor (to_text(CheckpointMetadata))
  CheckpointMetadata metadata;  // the same, of a manifest that was parsed
  std::vector<SavedFile> files;
  std::vector<SavedTensor> tensors;
  int64_t index_bytes = 0;  // of kIndex
  uint64_t index_hash = 0;
};

inline constexpr const char* kManifest = "manifest.json";
inline constexpr const char* kIndex = "model.safetensors.index.json";

/// What stands in a manifest or an index; of a file that is no JSON object only its first byte. Throws Failure(user) if
/// it has more than 256 MiB, Failure(environment).
std::string read_json(const std::string& path);

std::string to_text(const Manifest& manifest);  // manifest.json, its own hash before it
/// Of such a file. Throws Failure(user) naming `path` and what is wrong with it: a changed byte, a value of another
/// type or out of bounds (with its key), ranges that overlap or lie outside their files, names that are paths.
Manifest parse_manifest(const std::string& path, const std::string& text);

/// The files of the tensors in a model.safetensors.index.json, which must be names in its own folder. Throws
/// Failure(user).
std::map<std::string, std::string> parse_index(const std::string& path, const std::string& text);

/// hash_of(), part by part.
class Hash {
 public:
  Hash();
  ~Hash();
  Hash(const Hash&) = delete;
  void add(const void* data, int64_t bytes);  // data[bytes], behind those before
  uint64_t value() const;

 private:
  void* state_;
};

uint64_t hash_of(const void* data, int64_t bytes);  // XXH3 of data[bytes]
std::string hex(uint64_t value);                    // 16 digits

}  // namespace zr::host
