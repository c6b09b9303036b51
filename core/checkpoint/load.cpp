#include "checkpoint/load.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <string_view>
#include <unordered_map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/folder.hpp"

namespace zr::host::checkpoint {

namespace fs = std::filesystem;

namespace {
const std::string kRemedy = "; load another checkpoint (`zeroth verify` reports which are intact)";
const char* kSingleFile = "model.safetensors";

uint64_t index_key(const std::string& kind, const std::string& name) {
  return hash_of(name.data(), static_cast<int64_t>(name.size())) +
         hash_of(kind.data(), static_cast<int64_t>(kind.size()));
}

// The files that an index (tensor -> file) names, in the order of their first tensors.
std::vector<std::string> distinct_files(const std::map<std::string, std::string>& index) {
  std::vector<std::string> files;
  std::set<std::string> seen;
  for (const auto& [tensor, file] : index)
    if (seen.insert(file).second) files.push_back(file);
  return files;
}
}  // namespace

bool is_from_other_program(const std::string& path) {
  const fs::path root(path);
  std::error_code error;
  if (!fs::is_directory(root, error)) return path.ends_with(".safetensors");
  return !path_exists(root / kManifest) && checkpoints_in(path).empty() &&
         (path_exists(root / kIndex) || path_exists(root / kSingleFile));
}

Checkpoint::Checkpoint(const std::string& folder, const std::function<void(int64_t, int64_t)>& on_progress)
    : folder_(folder), from_other_program_(is_from_other_program(folder)) {
  if (from_other_program_) {
    open_from_other_program();
  } else {
    read_manifest();
    check_step();
    check_index();
    for (uint32_t i = 0; i < manifest_.files.size(); ++i) {
      check_file(i);
      if (on_progress) on_progress(i + 1, static_cast<int64_t>(manifest_.files.size()));
    }
  }
  index_.reserve(manifest_.tensors.size());
  for (uint32_t i = 0; i < manifest_.tensors.size(); ++i)
    index_.emplace_back(index_key(manifest_.tensors[i].kind, manifest_.tensors[i].name), i);
  std::sort(index_.begin(), index_.end());
}

void Checkpoint::read_manifest() {
  const std::string path = (fs::path(folder_) / kManifest).string();
  const ReadWatch::Read reading(*watch_, path, 0);
  if (!path_exists(path))
    fail_user(fmt::format("{}: has no {}, so no checkpoint was committed there; name a committed checkpoint", folder_,
                          kManifest));
  manifest_ = parse_manifest(path, read_json(path));
}

// Checked only if the folder name has the form of a checkpoint name; a renamed folder does not give a step.
void Checkpoint::check_step() const {
  std::error_code error;
  const fs::path given = fs::absolute(folder_, error).lexically_normal();
  for (const fs::path& path :
       {given.has_filename() ? given : given.parent_path(), fs::weakly_canonical(folder_, error)})
    if (const std::string name = path.filename().string();
        is_checkpoint_name(name) && step_of_name(name) != manifest_.step)
      fail_user(fmt::format("{}: the folder name gives step {}, but its manifest gives step {}{}", printable(folder_),
                            step_of_name(name) ? std::to_string(*step_of_name(name)) : name.substr(name.find('-') + 1),
                            manifest_.step, kRemedy));
}

// Zeroth does not read the index, but other programs do.
void Checkpoint::check_index() const {
  const std::string path = (fs::path(folder_) / kIndex).string();
  if (!path_exists(path)) fail_user(fmt::format("{}: is missing{}", path, kRemedy));
  const std::string text = read_json(path);
  const auto bytes = static_cast<int64_t>(text.size());
  if (bytes != manifest_.index_bytes || hash_of(text.data(), bytes) != manifest_.index_hash)
    fail_user(fmt::format("{}: was changed since it was written{}", path, kRemedy));
}

void Checkpoint::open_from_other_program() {
  const fs::path root(folder_);
  std::error_code error;
  const bool is_folder = fs::is_directory(root, error);
  manifest_.metadata_json = "{}";
  if (is_folder && path_exists(root / kIndex)) return open_indexed_files();
  TensorHeader header = open_file_without_manifest(is_folder ? kSingleFile : "");
  for (StoredTensor& stored : header.tensors) add_weight(std::move(stored), header.data);
}

// Takes each tensor from the file for which the index lists it.
void Checkpoint::open_indexed_files() {
  const fs::path root(folder_);
  const std::string path = (root / kIndex).string();
  std::map<std::string, std::string> missing = parse_index(path, read_json(path));  // tensor -> file
  for (const std::string& name : distinct_files(missing)) {
    TensorHeader header = open_file_without_manifest(name);
    for (StoredTensor& stored : header.tensors) {
      const auto listed = missing.find(stored.name);
      if (listed == missing.end() || listed->second != name) continue;
      missing.erase(listed);
      add_weight(std::move(stored), header.data);
    }
  }
  if (!missing.empty())
    fail_user(printable(fmt::format("{}: has no tensor '{}', although {} lists it there",
                                    (root / missing.begin()->second).string(), missing.begin()->first, kIndex)) +
              "; download the files again");
}

// Opens a file of the folder, or folder_ itself if `name` is empty. Throws if the file belongs to a checkpoint.
TensorHeader Checkpoint::open_file_without_manifest(const std::string& name) {
  const std::string path = name.empty() ? folder_ : (fs::path(folder_) / name).string();
  const ReadWatch::Read reading(*watch_, path, 0);
  if (!path_exists(path)) read_header(path);  // throws
  files_.emplace_back(path, File::Mode::read_following_links);
  TensorHeader header = read_header(files_.back());
  if (!name.empty() && header.metadata.count("zeroth_run"))
    fail_user(
        fmt::format("{}: has no {}: the checkpoint was not committed, or its manifest was deleted; name another "
                    "checkpoint, or one of the .safetensors files to load weights without verification",
                    folder_, kManifest));
  manifest_.files.push_back({name, files_.back().size(), 0, header.data});
  manifest_.tensors.reserve(manifest_.tensors.size() + header.tensors.size());
  return header;
}

// Adds a tensor of the file that was opened last. `data`: the offset of the file's first data byte.
void Checkpoint::add_weight(StoredTensor stored, int64_t data) {
  SavedTensor tensor;
  static_cast<TensorInfo&>(tensor) = {
      "weight", std::move(stored.name), std::move(stored.dtype), std::move(stored.shape), {}};
  tensor.file = static_cast<uint32_t>(files_.size() - 1);
  tensor.offset = data + stored.begin;
  manifest_.tensors.push_back(std::move(tensor));
}

void Checkpoint::check_file(uint32_t index) {
  const SavedFile& saved = manifest_.files[index];
  const std::string path = (fs::path(folder_) / saved.name).string();
  const ReadWatch::Read reading(*watch_, path, 0);
  if (!path_exists(path)) fail_user(fmt::format("{}: is missing{}", path, kRemedy));
  files_.emplace_back(path, File::Mode::read);
  const File& file = files_.back();
  if (file.size() != saved.bytes)
    fail_user(fmt::format("{}: has {} bytes, but the manifest says {}{}", path, file.size(), saved.bytes, kRemedy));
  std::string header(static_cast<std::size_t>(saved.data), '\0');
  file.read(0, header.data(), saved.data);
  if (hash_of(header.data(), saved.data) == saved.header) return check_tensors(index, read_header(file));
  std::string difference;
  try {
    const TensorHeader other = read_header(file);
    const auto step = other.metadata.find("zeroth_step"), run = other.metadata.find("zeroth_run");
    if (step != other.metadata.end() && run != other.metadata.end() &&
        (step->second != std::to_string(manifest_.step) || run->second != manifest_.run))
      difference = printable(fmt::format("belongs to step {} of run {}, but the checkpoint is step {} of run {}",
                                         step->second, run->second, manifest_.step, manifest_.run));
  } catch (const Error&) {
  }
  fail_user(fmt::format("{}: {}{}", path,
                        difference.empty() ? "its header was changed since it was written" : difference, kRemedy));
}

// Other programs read the header, Zeroth reads the manifest: both must describe the same tensors.
void Checkpoint::check_tensors(uint32_t index, const TensorHeader& header) const {
  const SavedFile& saved = manifest_.files[index];
  std::unordered_map<std::string_view, const StoredTensor*> stored;
  for (const StoredTensor& tensor : header.tensors) stored.emplace(tensor.name, &tensor);
  for (const SavedTensor& tensor : manifest_.tensors) {
    if (tensor.file != index) continue;
    const auto found = stored.find(tensor.name);
    if (found == stored.end() || found->second->dtype != tensor.dtype || found->second->shape != tensor.shape ||
        header.data + found->second->begin != tensor.offset)
      fail_user(printable(fmt::format("{}: its header does not describe {} '{}' as the manifest does",
                                      (fs::path(folder_) / saved.name).string(), tensor.kind, tensor.name)) +
                kRemedy);
    stored.erase(found);
  }
  if (!stored.empty())
    fail_user(printable(fmt::format("{}: its header has '{}', which the manifest does not list for this file",
                                    (fs::path(folder_) / saved.name).string(), stored.begin()->first)) +
              kRemedy);
}

const SavedTensor* Checkpoint::find(const std::string& kind, const std::string& name) const {
  const uint64_t key = index_key(kind, name);
  for (auto at = std::lower_bound(index_.begin(), index_.end(), std::pair(key, 0u));
       at != index_.end() && at->first == key; ++at)
    if (const SavedTensor& tensor = manifest_.tensors[at->second]; tensor.kind == kind && tensor.name == name)
      return &tensor;
  return nullptr;
}

void Checkpoint::read_bytes(const File& file, int64_t at, void* to, int64_t bytes) const {
  constexpr int64_t kPart = int64_t{8} << 20;  // so that a long read is not taken for one that does not return
  for (int64_t done = 0; done < bytes; done += kPart) {
    const ReadWatch::Read reading(*watch_, file.path(), at + done);
    file.read(at + done, static_cast<char*>(to) + done, std::min(kPart, bytes - done));
  }
}

// Reads a full chunk to `to` and hashes it while it is in the cache.
void Checkpoint::read_verified(const SavedTensor& tensor, const Chunk& chunk, int64_t first, void* to) const {
  constexpr int64_t kPart = int64_t{256} << 10;
  const File& file = files_[tensor.file];
  Hash hash;
  for (int64_t at = 0; at < chunk.bytes; at += kPart) {
    const int64_t n = std::min(kPart, chunk.bytes - at);
    char* part = static_cast<char*>(to) + at;
    read_bytes(file, tensor.offset + first + at, part, n);
    hash.add(part, n);
  }
  if (hash.value() != chunk.hash)
    fail_user(fmt::format("{}' was changed since it was written, within the {} bytes at {}{}",
                          printable(fmt::format("{}: {} '{}", file.path(), tensor.kind, tensor.name)), chunk.bytes,
                          tensor.offset + first, kRemedy));
}

void Checkpoint::read(const SavedTensor& tensor, int64_t first, int64_t bytes, void* to) const {
  if (first < 0 || bytes < 0 || first > tensor.bytes() || bytes > tensor.bytes() - first)
    fail_internal(fmt::format("cannot read bytes {} to {} of {} '{}', which has {} bytes", first, first + bytes,
                              tensor.kind, tensor.name, tensor.bytes()));
  if (tensor.chunks.empty()) return read_bytes(files_[tensor.file], tensor.offset + first, to, bytes);
  int64_t at = 0;
  for (const Chunk& chunk : tensor.chunks) {
    const int64_t from = std::max(at, first), end = std::min(at + chunk.bytes, first + bytes);
    char* destination = static_cast<char*>(to) + (from - first);
    if (from < end && end - from == chunk.bytes) {
      read_verified(tensor, chunk, at, destination);
    } else if (from < end) {
      chunk_buffer_.resize(std::max(chunk_buffer_.size(), static_cast<std::size_t>(chunk.bytes)));
      read_verified(tensor, chunk, at, chunk_buffer_.data());
      std::memcpy(destination, chunk_buffer_.data() + (from - at), static_cast<std::size_t>(end - from));
    }
    at += chunk.bytes;
    if (at >= first + bytes) return;
  }
}

void Checkpoint::verify(const std::function<void(int64_t)>& on_progress, int portion, int portions) const {
  int64_t done = 0;
  int chunk_index = 0;
  chunk_buffer_.resize(static_cast<std::size_t>(largest_chunk()));
  for (const SavedTensor& tensor : manifest_.tensors) {
    int64_t at = 0;
    for (const Chunk& chunk : tensor.chunks) {
      if (chunk_index++ % portions == portion) {
        read_verified(tensor, chunk, at, chunk_buffer_.data());
        on_progress(done += chunk.bytes);
      }
      at += chunk.bytes;
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

}  // namespace zr::host::checkpoint
