#include "checkpoint/save.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>

#include "base/directory.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host::checkpoint {

namespace {
struct Written {
  uint32_t tensor;
  int64_t first, bytes;
  uint64_t hash;
};

// Weights and buffers share files, because other programs load exactly this set.
std::string stem_of(const std::string& kind) {
  if (kind == "weight" || kind == "buffer") return "model";
  if (kind == kRankBuffer) return "rank-buffers";
  std::string stem = kind.starts_with("state.") ? kind.substr(6) : kind;
  for (char& c : stem)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_') c = '-';
  return stem;
}

// The file and offset of every tensor; the layout does not depend on the number of ranks or the strategy.
struct Layout {
  Manifest manifest;  // without chunks
  std::vector<std::string> headers;
};

Layout lay_out(const CheckpointContents& image, int64_t file_bytes) {
  Layout layout;
  layout.manifest.step = image.step;
  layout.manifest.run = image.run;
  layout.manifest.metadata_json = image.metadata_json;
  for (const TensorInfo& tensor : image.tensors) {
    if (tensor.name.size() > kMaxNameBytes || tensor.kind.size() > kMaxNameBytes)
      fail_user("the name of a tensor has " + std::to_string(std::max(tensor.name.size(), tensor.kind.size())) +
                " bytes, but a checkpoint allows at most " + std::to_string(kMaxNameBytes) +
                "; give the modules shorter names");
    layout.manifest.tensors.emplace_back();
    static_cast<TensorInfo&>(layout.manifest.tensors.back()) = tensor;
  }
  std::map<std::string, std::vector<uint32_t>> stems;
  std::map<std::string, std::string> kinds;  // by stem; two states never share a file, even with equal stems
  for (uint32_t i = 0; i < image.tensors.size(); ++i) {
    const std::string& kind = image.tensors[i].kind;
    std::string stem = stem_of(kind);
    const bool state = kind.starts_with("state.");
    while (state && (stem == "model" || stem == "master" || !(kinds.emplace(stem, kind).first->second == kind)))
      stem = "state-" + stem;
    stems[stem].push_back(i);
  }
  for (auto& [stem, members] : stems) {
    // Large elements first, so that each tensor begins at a multiple of its element size.
    std::stable_sort(members.begin(), members.end(), [&](uint32_t a, uint32_t b) {
      return stored_size(image.tensors[a].dtype) > stored_size(image.tensors[b].dtype);
    });
    std::vector<TensorHeader> headers(1);
    int64_t at = 0;
    for (const uint32_t i : members) {
      if (at >= file_bytes) {
        headers.emplace_back();
        at = 0;
      }
      SavedTensor& tensor = layout.manifest.tensors[i];
      tensor.file = static_cast<uint32_t>(layout.manifest.files.size() + headers.size() - 1);
      tensor.at = at;
      headers.back().tensors.push_back({tensor.name, tensor.dtype, tensor.shape, at, at + tensor.bytes()});
      at += tensor.bytes();
    }
    for (std::size_t k = 0; k < headers.size(); ++k) {
      headers[k].metadata = {{"format", "pt"}, {"zeroth_run", image.run}, {"zeroth_step", std::to_string(image.step)}};
      layout.headers.push_back(write_header(headers[k]));
      char part[64];
      std::snprintf(part, sizeof part, "-%05zu-of-%05zu.safetensors", k + 1, headers.size());
      const std::string& header = layout.headers.back();
      layout.manifest.files.push_back(
          {stem + part, headers[k].data + (headers[k].tensors.empty() ? 0 : headers[k].tensors.back().end),
           hash_of(header.data(), static_cast<int64_t>(header.size())), headers[k].data});
    }
  }
  for (SavedTensor& tensor : layout.manifest.tensors) tensor.at += layout.manifest.files[tensor.file].data;
  return layout;
}

std::string index_of(const Manifest& manifest) {
  std::vector<std::pair<std::string, std::string>> files;
  int64_t bytes = 0;
  for (const SavedTensor& tensor : manifest.tensors)
    if (stem_of(tensor.kind) == "model") {
      files.emplace_back(tensor.name, manifest.files[tensor.file].name);
      bytes += tensor.bytes();
    }
  return write_index(bytes, files);
}

[[noreturn]] void fail_replaced(const std::string& path) {
  fail_environment(path + ": was replaced by another user or process while the checkpoint was written; make " +
                   "sure that only this job writes to the folder");
}

// Creates the folder and its files, and writes the headers of the files.
Directory begin(const Directory& root, const std::string& name, const Layout& layout) {
  remove_uncommitted(root);
  if (!root.make(name)) fail_file(root.path() + "/" + name, "cannot be created", EEXIST);
  Directory folder = root.existing(name);
  failpoint("save.folder_made");
  for (std::size_t i = 0; i < layout.headers.size(); ++i) {
    const SavedFile& about = layout.manifest.files[i];
    File file = folder.create(about.name);
    if (file.owner() != folder.owner()) fail_replaced(folder.path());  // replaced between make() and existing()
    file.resize(about.bytes);
    file.write(0, layout.headers[i].data(), static_cast<int64_t>(layout.headers[i].size()));
    if (about.bytes == about.data) file.sync();  // no rank writes to it
  }
  failpoint("save.files_made");
  return folder;
}

// Opens the folder that rank 0 created, in another process and perhaps on another host. Its owner must be the user that
// owns the files that this node creates in it.
Directory open_folder(const Directory& root, const std::string& name, int rank) {
  Directory folder = root.existing(name);
  const std::string own = ".rank-" + std::to_string(rank);
  if (folder.create(own).owner() != folder.owner()) fail_replaced(folder.path());
  folder.remove(own);
  return folder;
}

// Opens a file that rank 0 created. Checks that the header is that of this job and step, so that it is not a file that
// replaced it.
File open_created(const Directory& folder, const Layout& layout, uint32_t index) {
  const SavedFile& about = layout.manifest.files[index];
  File file = folder.open_file(about.name);
  std::string header(static_cast<std::size_t>(about.data), '\0');
  if (file.size() == about.bytes) file.read(0, header.data(), about.data);
  if (header != layout.headers[index]) fail_replaced(file.path());
  return file;
}

std::vector<Written> write_slabs(const Directory& folder, const Layout& layout, const CheckpointContents& image,
                                 const CheckpointComm& comm, int64_t chunk_bytes) {
  std::vector<const Slab*> slabs;
  for (const Slab& slab : image.slabs) slabs.push_back(&slab);
  // Writers of the same file wait for each other, so each rank begins with a different file.
  const auto files = static_cast<uint32_t>(layout.manifest.files.size());
  const auto turn = [&](const Slab* slab) {
    const SavedTensor& tensor = layout.manifest.tensors[slab->tensor];
    const auto ahead =
        static_cast<uint32_t>(static_cast<uint64_t>(comm.rank) * files / static_cast<uint64_t>(comm.world));
    return std::pair((tensor.file + files - ahead) % files, tensor.at + slab->first);
  };
  std::stable_sort(slabs.begin(), slabs.end(), [&](const Slab* a, const Slab* b) { return turn(a) < turn(b); });
  std::vector<Written> written;
  std::vector<char> staging;
  std::map<uint32_t, std::unique_ptr<File>> open;
  for (const Slab* slab : slabs) {  // a full disk is reported before the first write
    const SavedTensor& tensor = layout.manifest.tensors[slab->tensor];
    std::unique_ptr<File>& file = open[tensor.file];
    if (!file) file = std::make_unique<File>(open_created(folder, layout, tensor.file));
    if (slab->bytes > 0) file->reserve(tensor.at + slab->first, slab->bytes);
  }
  for (const Slab* slab : slabs) {
    const SavedTensor& tensor = layout.manifest.tensors[slab->tensor];
    const std::unique_ptr<File>& file = open[tensor.file];
    for (int64_t done = 0; done < slab->bytes;) {
      const int64_t n = std::min(chunk_bytes, slab->bytes - done);
      const char* from = static_cast<const char*>(slab->data) + done;
      if (!slab->data) {
        staging.resize(static_cast<std::size_t>(chunk_bytes));
        slab->read(done, n, staging.data());
        from = staging.data();
      }
      written.push_back({slab->tensor, slab->first + done, n, hash_of(from, n)});
      file->write(tensor.at + slab->first + done, from, n);
      file->begin_sync(tensor.at + slab->first + done, n);
      done += n;
      failpoint("save.chunk_written");
    }
  }
  failpoint("save.before_sync");
  for (const auto& [index, file] : open) file->sync();
  failpoint("save.synced");
  return written;
}

// Collects the chunks of all ranks, which must cover every byte of every tensor exactly once.
void take_chunks(Manifest& manifest, const std::vector<std::string>& chunks_of_ranks) {
  std::vector<Written> all;
  for (const std::string& bytes : chunks_of_ranks) {
    const std::size_t before = all.size();
    all.resize(before + bytes.size() / sizeof(Written));
    if (!bytes.empty()) std::memcpy(all.data() + before, bytes.data(), bytes.size());
  }
  std::sort(all.begin(), all.end(), [](const Written& a, const Written& b) {
    return std::pair(a.tensor, a.first) < std::pair(b.tensor, b.first);
  });
  std::vector<int64_t> reached(manifest.tensors.size(), 0);
  for (const Written& one : all) {
    if (one.first != reached[one.tensor])
      fail_internal("the ranks' parts of " + manifest.tensors[one.tensor].kind + " '" +
                    manifest.tensors[one.tensor].name + "' overlap or leave a gap at byte " +
                    std::to_string(reached[one.tensor]));
    reached[one.tensor] += one.bytes;
    manifest.tensors[one.tensor].chunks.push_back({one.bytes, one.hash});
  }
  for (std::size_t i = 0; i < reached.size(); ++i)
    if (reached[i] != manifest.tensors[i].bytes())
      fail_internal("no rank wrote the end of " + manifest.tensors[i].kind + " '" + manifest.tensors[i].name + "'");
}
}  // namespace

CheckpointComm single_rank_comm() {
  return {0, 1, [](const std::string& mine) { return std::vector<std::string>{mine}; },
          [](const std::string& text) { return text; }};
}

void run_on_all_ranks(const CheckpointComm& comm, const std::function<void()>& work) {
  std::string mine;  // exit code, then text
  try {
    work();
  } catch (const Error& failure) {
    mine = std::to_string(failure.exit_code()) + " " + failure.what();
  } catch (const std::exception& error) {
    mine = std::to_string(exit_code::internal) + " " + error.what();
  }
  std::string first;
  const std::vector<std::string> all = comm.gather(mine);
  for (std::size_t r = 0; r < all.size() && first.empty(); ++r)
    if (!all[r].empty()) {
      const auto space = all[r].find(' ');
      first = all[r].substr(0, space + 1) + (all.size() > 1 ? "rank " + std::to_string(r) + ": " : "") +
              all[r].substr(space + 1);
    }
  first = comm.broadcast(first);
  if (!first.empty()) fail_with(std::stoi(first), first.substr(first.find(' ') + 1));
}

SaveResult save(const std::string& path, const CheckpointContents& image, const CheckpointComm& comm,
                const SaveOptions& options) {
  Layout layout = lay_out(image, options.file_bytes);
  const std::string step = "step " + std::to_string(image.step);
  const auto first = [&](const std::function<void()>& work) {
    run_on_all_ranks(comm, [&] {
      if (comm.rank == 0) work();
    });
  };
  std::optional<Directory> root, folder;
  std::string name;  // the name of the folder until the commit
  try {
    first([&] {
      root.emplace(Directory::open(path, true));
      name = new_partial_name(image.step);
      folder.emplace(begin(*root, name, layout));
    });
    name = comm.broadcast(name);
    std::string chunks;
    run_on_all_ranks(comm, [&] {
      if (!folder) folder.emplace(open_folder(Directory::open(path, false), name, comm.rank));
      const std::vector<Written> written = write_slabs(*folder, layout, image, comm, options.chunk_bytes);
      chunks.assign(reinterpret_cast<const char*>(written.data()), written.size() * sizeof(Written));
    });
    const std::vector<std::string> chunks_of_ranks = comm.gather(chunks);
    first([&] {
      take_chunks(layout.manifest, chunks_of_ranks);
      const std::string index = index_of(layout.manifest);
      folder->write(kIndex, index);
      layout.manifest.index_bytes = static_cast<int64_t>(index.size());
      layout.manifest.index_hash = hash_of(index.data(), layout.manifest.index_bytes);
      failpoint("save.index_written");
      folder->write(kManifest, to_text(layout.manifest));
      failpoint("save.manifest_written");
      commit_checkpoint(*root, name, *folder, image.step);
    });
  } catch (const Error& failure) {
    // All ranks have reached this point or have ended, so no rank is still writing.
    if (root) try {
        remove_uncommitted(*root);
      } catch (const Error&) {  // the next save removes it
      }
    fail_like(failure, step + " was not saved: " + failure.what() + " (earlier checkpoints are unchanged)");
  }
  SaveResult saved{(std::filesystem::path(path) / checkpoint_name(image.step)).string(), {}};
  try {
    first([&] {
      for (const std::string& one : finish_commit(*root, name, image.step))
        saved.warnings.push_back(path + ": renamed a checkpoint of a later step, from which this run did not resume, " +
                                 "to " + one + "; remove it if it is not needed");
    });
  } catch (const Error& failure) {
    fail_like(failure, step + " was saved, but may not survive a power loss: " + failure.what());
  }
  try {
    first([&] { remove_old_checkpoints(*root, options.keep, image.last_step_applied); });
  } catch (const Error& failure) {
    if (failure.exit_code() == exit_code::peer_lost) throw;
    saved.warnings.push_back(step + " was saved, but older checkpoints could not be removed: " + failure.what());
  }
  return saved;
}

}  // namespace zr::host::checkpoint
