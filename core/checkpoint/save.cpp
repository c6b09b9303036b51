#include "checkpoint/save.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
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
struct WrittenChunk {
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

Layout lay_out(const CheckpointContents& contents, int64_t file_bytes) {
  Layout layout;
  layout.manifest.step = contents.step;
  layout.manifest.run = contents.run;
  layout.manifest.metadata_json = contents.metadata_json;
  for (const TensorInfo& tensor : contents.tensors) {
    if (tensor.name.size() > kMaxNameBytes || tensor.kind.size() > kMaxNameBytes)
      fail_user(fmt::format(
          "the name of a tensor has {} bytes, but a checkpoint allows at most {}; give the modules shorter names",
          std::max(tensor.name.size(), tensor.kind.size()), kMaxNameBytes));
    layout.manifest.tensors.emplace_back();
    static_cast<TensorInfo&>(layout.manifest.tensors.back()) = tensor;
  }
  std::map<std::string, std::vector<uint32_t>> stems;
  std::map<std::string, std::string> kinds;  // by stem; two states never share a file, even with equal stems
  for (uint32_t i = 0; i < contents.tensors.size(); ++i) {
    const std::string& kind = contents.tensors[i].kind;
    std::string stem = stem_of(kind);
    const bool state = kind.starts_with("state.") || kind.starts_with(kLocalState);
    while (state && (stem == "model" || stem == "master" || !(kinds.emplace(stem, kind).first->second == kind)))
      stem = "state-" + stem;
    stems[stem].push_back(i);
  }
  for (auto& [stem, members] : stems) {
    // Large elements first, so that each tensor begins at a multiple of its element size.
    std::stable_sort(members.begin(), members.end(), [&](uint32_t a, uint32_t b) {
      return stored_size(contents.tensors[a].dtype) > stored_size(contents.tensors[b].dtype);
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
      tensor.offset = at;
      headers.back().tensors.push_back({tensor.name, tensor.dtype, tensor.shape, at, at + tensor.bytes()});
      at += tensor.bytes();
    }
    for (std::size_t k = 0; k < headers.size(); ++k) {
      headers[k].metadata = {
          {"format", "pt"}, {"zeroth_run", contents.run}, {"zeroth_step", std::to_string(contents.step)}};
      layout.headers.push_back(write_header(headers[k]));
      const std::string& header = layout.headers.back();
      layout.manifest.files.push_back(
          {fmt::format("{}-{:05}-of-{:05}.safetensors", stem, k + 1, headers.size()),
           headers[k].data + (headers[k].tensors.empty() ? 0 : headers[k].tensors.back().end),
           hash_of(header.data(), static_cast<int64_t>(header.size())), headers[k].data});
    }
  }
  for (SavedTensor& tensor : layout.manifest.tensors) tensor.offset += layout.manifest.files[tensor.file].data;
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
  fail_environment(
      fmt::format("{}: was replaced by another user or process while the checkpoint was written; make sure that only "
                  "this job writes to the folder",
                  path));
}

// Creates the folder and its files, and writes the headers of the files.
Directory begin(const Directory& root, const std::string& name, const Layout& layout) {
  remove_uncommitted(root);
  if (!root.make(name)) fail_file(fmt::format("{}/{}", root.path(), name), "cannot be created", EEXIST);
  Directory folder = root.existing(name);
  failpoint("save.folder_made");
  for (std::size_t i = 0; i < layout.headers.size(); ++i) {
    const SavedFile& saved_file = layout.manifest.files[i];
    File file = folder.create(saved_file.name);
    if (file.owner() != folder.owner()) fail_replaced(folder.path());  // replaced between make() and existing()
    file.resize(saved_file.bytes);
    file.write(0, layout.headers[i].data(), static_cast<int64_t>(layout.headers[i].size()));
    if (saved_file.bytes == saved_file.data) file.sync();  // no rank writes to it
  }
  failpoint("save.files_made");
  return folder;
}

// Opens the folder that rank 0 created, in another process and perhaps on another node. Its owner must be the user that
// owns the files that this node creates in it.
Directory open_folder(const Directory& root, const std::string& name, int rank) {
  Directory folder = root.existing(name);
  const std::string probe = fmt::format(".rank-{}", rank);
  if (folder.create(probe).owner() != folder.owner()) fail_replaced(folder.path());
  folder.remove(probe);
  return folder;
}

// Opens a file that rank 0 created. Checks that the header is that of this job and step, so that it is not a file that
// replaced it.
File open_created(const Directory& folder, const Layout& layout, uint32_t index) {
  const SavedFile& saved_file = layout.manifest.files[index];
  File file = folder.open_file(saved_file.name);
  std::string header(static_cast<std::size_t>(saved_file.data), '\0');
  if (file.size() == saved_file.bytes) file.read(0, header.data(), saved_file.data);
  if (header != layout.headers[index]) fail_replaced(file.path());
  return file;
}

std::vector<WrittenChunk> write_slabs(const Directory& folder, const Layout& layout, const CheckpointContents& contents,
                                      const CheckpointComm& comm, int64_t chunk_bytes) {
  std::vector<const Slab*> slabs;
  for (const Slab& slab : contents.slabs) slabs.push_back(&slab);
  // Writers of the same file wait for each other, so each rank begins with a different file.
  const auto files = static_cast<uint32_t>(layout.manifest.files.size());
  const auto write_order = [&](const Slab* slab) {
    const SavedTensor& tensor = layout.manifest.tensors[slab->tensor];
    const auto first_file =
        static_cast<uint32_t>(static_cast<uint64_t>(comm.rank) * files / static_cast<uint64_t>(comm.world));
    return std::pair((tensor.file + files - first_file) % files, tensor.offset + slab->first);
  };
  std::stable_sort(slabs.begin(), slabs.end(),
                   [&](const Slab* a, const Slab* b) { return write_order(a) < write_order(b); });
  std::vector<WrittenChunk> written;
  std::vector<char> staging;
  std::map<uint32_t, std::unique_ptr<File>> open;
  for (const Slab* slab : slabs) {  // a full disk is reported before the first write
    const SavedTensor& tensor = layout.manifest.tensors[slab->tensor];
    std::unique_ptr<File>& file = open[tensor.file];
    if (!file) file = std::make_unique<File>(open_created(folder, layout, tensor.file));
    if (slab->bytes > 0) file->reserve(tensor.offset + slab->first, slab->bytes);
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
      file->write(tensor.offset + slab->first + done, from, n);
      file->begin_sync(tensor.offset + slab->first + done, n);
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
void collect_chunks(Manifest& manifest, const std::vector<std::string>& chunks_of_ranks) {
  std::vector<WrittenChunk> chunks;
  for (const std::string& bytes : chunks_of_ranks) {
    const std::size_t before = chunks.size();
    chunks.resize(before + bytes.size() / sizeof(WrittenChunk));
    if (!bytes.empty()) std::memcpy(chunks.data() + before, bytes.data(), bytes.size());
  }
  std::sort(chunks.begin(), chunks.end(), [](const WrittenChunk& a, const WrittenChunk& b) {
    return std::pair(a.tensor, a.first) < std::pair(b.tensor, b.first);
  });
  std::vector<int64_t> covered(manifest.tensors.size(), 0);
  for (const WrittenChunk& chunk : chunks) {
    if (chunk.first != covered[chunk.tensor])
      fail_internal(fmt::format("the ranks' parts of {} '{}' overlap or leave a gap at byte {}",
                                manifest.tensors[chunk.tensor].kind, manifest.tensors[chunk.tensor].name,
                                covered[chunk.tensor]));
    covered[chunk.tensor] += chunk.bytes;
    manifest.tensors[chunk.tensor].chunks.push_back({chunk.bytes, chunk.hash});
  }
  for (std::size_t i = 0; i < covered.size(); ++i)
    if (covered[i] != manifest.tensors[i].bytes())
      fail_internal(
          fmt::format("no rank wrote the end of {} '{}'", manifest.tensors[i].kind, manifest.tensors[i].name));
}
}  // namespace

CheckpointComm single_rank_comm() {
  return {0, 1, [](const std::string& text) { return std::vector<std::string>{text}; },
          [](const std::string& text) { return text; }};
}

void run_on_all_ranks(const CheckpointComm& comm, const std::function<void()>& work) {
  std::string failure_text;  // exit code, then text
  try {
    work();
  } catch (const Error& failure) {
    failure_text = fmt::format("{} {}", failure.exit_code(), failure.what());
  } catch (const std::exception& error) {
    failure_text = fmt::format("{} {}", exit_code::internal, error.what());
  }
  std::string first_failure;
  const std::vector<std::string> texts = comm.gather(failure_text);
  for (std::size_t r = 0; r < texts.size() && first_failure.empty(); ++r)
    if (!texts[r].empty()) {
      const auto space = texts[r].find(' ');
      first_failure = texts[r].substr(0, space + 1) + (texts.size() > 1 ? fmt::format("rank {}: ", r) : "") +
                      texts[r].substr(space + 1);
    }
  first_failure = comm.broadcast(first_failure);
  if (!first_failure.empty()) fail_with(std::stoi(first_failure), first_failure.substr(first_failure.find(' ') + 1));
}

namespace {
void run_on_rank_0(const CheckpointComm& comm, const std::function<void()>& work) {
  run_on_all_ranks(comm, [&] {
    if (comm.rank == 0) work();
  });
}

// After the commit of the folder `name` in `root` (null except on rank 0).
SaveResult finish_save(const std::string& path, const Directory* root, const std::string& name,
                       const CheckpointContents& contents, const CheckpointComm& comm, const SaveOptions& options) {
  const std::string step_text = fmt::format("step {}", contents.step);
  SaveResult saved{(std::filesystem::path(path) / checkpoint_name(contents.step)).string(), {}};
  std::vector<std::string> superseded;
  try {
    run_on_rank_0(comm, [&] {
      superseded = finish_commit(*root, name, contents.step);
      const std::string until = options.keep > 0
                                    ? "it counts as the oldest for checkpoint.keep, so that a later save may remove it"
                                    : "remove it if it is not needed";
      for (const std::string& new_name : superseded)
        saved.warnings.push_back(
            fmt::format("{}: renamed a checkpoint of a later step, from which this run did not resume, to {}; {}", path,
                        new_name, until));
    });
  } catch (const Error& failure) {
    fail_like(failure, fmt::format("{} was saved, but may not survive a power loss: {}", step_text, failure.what()));
  }
  try {
    run_on_rank_0(comm, [&] { remove_old_checkpoints(*root, options.keep, contents.last_step_applied, superseded); });
  } catch (const Error& failure) {
    if (failure.exit_code() == exit_code::peer_lost) throw;
    saved.warnings.push_back(
        fmt::format("{} was saved, but older checkpoints could not be removed: {}", step_text, failure.what()));
  }
  return saved;
}
}  // namespace

SaveResult save(const std::string& path, const CheckpointContents& contents, const CheckpointComm& comm,
                const SaveOptions& options) {
  Layout layout = lay_out(contents, options.file_bytes);
  const std::string step_text = fmt::format("step {}", contents.step);
  std::optional<Directory> root, folder;
  std::string name;  // the name of the folder until the commit
  try {
    run_on_rank_0(comm, [&] {
      root.emplace(Directory::open(path, true));
      name = new_partial_name(contents.step);
      folder.emplace(begin(*root, name, layout));
    });
    name = comm.broadcast(name);
    std::string chunks;
    run_on_all_ranks(comm, [&] {
      if (!folder) folder.emplace(open_folder(Directory::open(path, false), name, comm.rank));
      const std::vector<WrittenChunk> written = write_slabs(*folder, layout, contents, comm, options.chunk_bytes);
      chunks.assign(reinterpret_cast<const char*>(written.data()), written.size() * sizeof(WrittenChunk));
    });
    const std::vector<std::string> chunks_of_ranks = comm.gather(chunks);
    run_on_rank_0(comm, [&] {
      collect_chunks(layout.manifest, chunks_of_ranks);
      const std::string index = index_of(layout.manifest);
      folder->write(kIndex, index);
      layout.manifest.index_bytes = static_cast<int64_t>(index.size());
      layout.manifest.index_hash = hash_of(index.data(), layout.manifest.index_bytes);
      failpoint("save.index_written");
      folder->write(kManifest, to_text(layout.manifest));
      failpoint("save.manifest_written");
      commit_checkpoint(*root, name, *folder, contents.step);
    });
  } catch (const Error& failure) {
    // All ranks have reached this point or have ended, so no rank is still writing.
    if (root) try {
        remove_uncommitted(*root);
      } catch (const Error&) {  // the next save removes it
      }
    if (dynamic_cast<const PeerLostError*>(&failure))  // which may end after the commit, before the other ranks know
      fail_like(failure, fmt::format("it is unknown whether {} was saved (earlier checkpoints are unchanged): {}",
                                     step_text, failure.what()));
    fail_like(failure,
              fmt::format("{} was not saved: {} (earlier checkpoints are unchanged)", step_text, failure.what()));
  }
  return finish_save(path, root ? &*root : nullptr, name, contents, comm, options);
}

}  // namespace zr::host::checkpoint
