#include "checkpoint/load.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>

#include "base/failure.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host {

namespace fs = std::filesystem;

namespace {
const std::string kRemedy = "; load another checkpoint (zeroth verify says which are whole)";
}

Checkpoint::Checkpoint(const std::string& folder) : folder_(folder) {
  const std::string path = (fs::path(folder) / kManifest).string();
  if (!fs::exists(path))
    fail_user(folder + ": has no " + kManifest + ": no checkpoint was committed there; name one that was");
  manifest_ = parse_manifest(path, read_file(path));
  for (uint32_t i = 0; i < manifest_.files.size(); ++i) check_file(i);
}

void Checkpoint::check_file(uint32_t index) {
  const SavedFile& about = manifest_.files[index];
  const std::string path = (fs::path(folder_) / about.name).string();
  if (!fs::exists(path)) fail_user(path + ": is missing" + kRemedy);
  files_.emplace_back(path, File::Use::read);
  const File& file = files_.back();
  if (file.size() != about.bytes)
    fail_user(path + ": has " + std::to_string(file.size()) + " bytes, the manifest says " +
              std::to_string(about.bytes) + kRemedy);
  std::string header(static_cast<std::size_t>(about.data), '\0');
  file.read(0, header.data(), about.data);
  if (hash_of(header.data(), about.data) == about.header) return;
  std::string whose;
  try {
    const TensorHeader other = read_header(path);
    const auto step = other.metadata.find("zeroth_step"), run = other.metadata.find("zeroth_run");
    if (step != other.metadata.end() && run != other.metadata.end() &&
        (step->second != std::to_string(manifest_.step) || run->second != manifest_.run))
      whose = "is of step " + step->second + " of run " + run->second + ", its checkpoint of step " +
              std::to_string(manifest_.step) + " of run " + manifest_.run;
  } catch (const Failure&) {
  }
  fail_user(path + ": " + (whose.empty() ? "its header was changed since it was written" : whose) + kRemedy);
}

const SavedTensor* Checkpoint::find(const std::string& role, const std::string& name) const {
  for (const SavedTensor& tensor : manifest_.tensors)
    if (tensor.role == role && tensor.name == name) return &tensor;
  return nullptr;
}

// A whole chunk to where there is room for it.
void Checkpoint::take(const SavedTensor& tensor, const Chunk& chunk, int64_t first, void* to) const {
  const File& file = files_[tensor.file];
  file.read(tensor.at + first, to, chunk.bytes);
  if (hash_of(to, chunk.bytes) != chunk.hash)
    fail_user(file.path() + ": " + tensor.role + " '" + tensor.name +
              "' was changed since it was written, within the " + std::to_string(chunk.bytes) + " bytes at " +
              std::to_string(tensor.at + first) + kRemedy);
}

void Checkpoint::read(const SavedTensor& tensor, int64_t first, int64_t bytes, void* to) const {
  int64_t at = 0;
  for (const Chunk& chunk : tensor.chunks) {
    const int64_t from = std::max(at, first), end = std::min(at + chunk.bytes, first + bytes);
    char* place = static_cast<char*>(to) + (from - first);
    if (from < end && end - from == chunk.bytes) {
      take(tensor, chunk, at, place);
    } else if (from < end) {
      room_.resize(std::max(room_.size(), static_cast<std::size_t>(chunk.bytes)));
      take(tensor, chunk, at, room_.data());
      std::memcpy(place, room_.data() + (from - at), static_cast<std::size_t>(end - from));
    }
    at += chunk.bytes;
    if (at >= first + bytes) return;
  }
}

void Checkpoint::verify(const std::function<void(int64_t)>& told) const {
  int64_t done = 0;
  room_.resize(static_cast<std::size_t>(largest_chunk()));
  for (const SavedTensor& tensor : manifest_.tensors) {
    int64_t at = 0;
    for (const Chunk& chunk : tensor.chunks) {
      take(tensor, chunk, at, room_.data());
      at += chunk.bytes;
      told(done += chunk.bytes);
    }
  }
}

int64_t Checkpoint::bytes() const {
  int64_t bytes = 0;
  for (const SavedTensor& tensor : manifest_.tensors) bytes += tensor.bytes();
  return bytes;
}

int64_t Checkpoint::largest_chunk() const {
  int64_t largest = 0;
  for (const SavedTensor& tensor : manifest_.tensors)
    for (const Chunk& chunk : tensor.chunks) largest = std::max(largest, chunk.bytes);
  return largest;
}

}  // namespace zr::host
