// `zeroth export`: writes a checkpoint's weights and buffers to safetensors files.
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <set>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/load.hpp"
#include "checkpoint/safetensors.hpp"
#include "cli/checkpoint_commands.hpp"
#include "cli/progress.hpp"
#include "update/cast.hpp"

namespace zr::host::cli {

namespace fs = std::filesystem;

namespace {
struct ExportItem {
  const checkpoint::SavedTensor *tensor, *source;  // source: the fp32 master weights if the dtype is converted
  std::string dtype;
  int64_t bytes() const {
    return tensor->bytes() / checkpoint::stored_size(tensor->dtype) * checkpoint::stored_size(dtype);
  }
};

// A file of the export and the tensors in it.
struct OutputFile {
  std::string path;
  checkpoint::TensorHeader header;
  std::vector<ExportItem> items;  // in the order of header.tensors
  std::string name() const { return fs::path(path).filename().string(); }
};

bool is_single_file(const ExportOptions& options) { return options.to.ends_with(".safetensors"); }

std::string index_path(const ExportOptions& options) { return (fs::path(options.to) / checkpoint::kIndex).string(); }

// Throws if the destination is a folder of checkpoints.
void check_destination(const ExportOptions& options) {
  if (path_exists((fs::path(options.to) / checkpoint::kManifest).string()) ||
      !checkpoint::checkpoints_in(options.to).empty())
    fail_user(fmt::format("zeroth export: {} contains checkpoints, which must not change; name another folder",
                          printable(options.to)));
}

// Throws if the file is in a checkpoint (also through links and "..") or is a hard link to a file of the exported one.
void check_target(const ExportOptions& options, const checkpoint::Checkpoint& from, const std::string& file) {
  std::error_code error;
  const fs::path parent = fs::weakly_canonical(fs::absolute(file), error).parent_path();
  const fs::path beside = fs::weakly_canonical(fs::absolute(file).parent_path(), error);
  for (const fs::path& folder : {parent, beside})
    if (path_exists(folder / checkpoint::kManifest))
      fail_user(
          fmt::format("zeroth export: {} is in the checkpoint {}, which must not change; name another destination",
                      printable(file), printable(folder.string())));
  struct stat target {
  }, source{};
  if (::stat(file.c_str(), &target) == 0)
    for (const checkpoint::SavedFile& saved : from.manifest().files) {
      const std::string path = saved.name.empty() ? from.folder() : (fs::path(from.folder()) / saved.name).string();
      if (::stat(path.c_str(), &source) == 0 && source.st_dev == target.st_dev && source.st_ino == target.st_ino)
        fail_user(
            fmt::format("zeroth export: {} is the same file as {}, which is being exported; name another destination",
                        printable(file), printable(path)));
    }
  if (!options.force && fs::symlink_status(file, error).type() != fs::file_type::not_found)
    fail_user(fmt::format("zeroth export: {} exists already; name another destination, or replace it with --force",
                          printable(file)));
}

// Files that are written under temporary names and renamed together. The destructor removes those not renamed.
class StagedFiles {
 public:
  explicit StagedFiles(bool replace) : replace_(replace) {}
  ~StagedFiles() {
    for (const auto& [temporary, path] : staged_) ::unlink(temporary.c_str());
    if (!committed_)
      for (const std::string& path : created_) ::unlink(path.c_str());
    std::error_code error;
    if (!made_.empty() && !committed_) fs::remove(made_, error);  // if it is empty
  }
  StagedFiles(const StagedFiles&) = delete;

  /// Creates a folder, which the destructor removes if commit() did not succeed.
  void make(const std::string& folder) {
    if (path_exists(folder)) return;
    make_folder(folder);
    made_ = folder;
  }
  /// Creates the temporary file for `path`. Messages about it name `path`.
  File create(const std::string& path) {
    const std::string temporary = fmt::format("{}.partial-{}", path, ::getpid());
    const int fd = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (fd < 0) fail_file(path, "cannot be created", errno);
    staged_.emplace_back(temporary, path);
    return {path, fd};
  }
  void commit() {
    while (!staged_.empty()) {
      const auto& [temporary, path] = staged_.front();
      if (!replace_ && ::link(temporary.c_str(), path.c_str()) == 0) {  // unlike rename(), never replaces a file
        created_.push_back(path);
        ::unlink(temporary.c_str());
      } else if (replace_ || errno == EPERM || errno == EOPNOTSUPP) {  // replaces, or has no hard links
        rename_path(temporary, path);
      } else {
        fail_file(path, "cannot be created", errno);
      }
      staged_.pop_front();
    }
    committed_ = true;
  }

 private:
  bool replace_, committed_ = false;
  std::string made_;
  std::vector<std::string> created_;                        // files that did not exist before
  std::deque<std::pair<std::string, std::string>> staged_;  // temporary name, name
};

// Converts the elements of the item and writes them to the file from byte `at` on, some MiB at a time.
void write_item(const checkpoint::Checkpoint& from, const ExportItem& item, File& file, int64_t at,
                const std::function<void(int64_t)>& wrote) {
  constexpr int64_t kElementsPerTransfer = int64_t{1} << 20;  // per read and write
  const int64_t size = checkpoint::stored_size(item.source->dtype), count = item.source->bytes() / size;
  const bool converts = item.source->dtype != item.dtype;
  const auto max_elements = static_cast<std::size_t>(std::min(kElementsPerTransfer, count));
  std::vector<char> bytes(max_elements * static_cast<std::size_t>(size)), downcasted(converts ? max_elements * 4 : 0);
  std::vector<float> upcasted(converts ? max_elements : 0);
  for (int64_t first = 0; first < count; first += kElementsPerTransfer) {
    const int64_t n = std::min(kElementsPerTransfer, count - first);
    from.read(*item.source, first * size, n * size, bytes.data());
    const char* out = bytes.data();
    if (converts) {
      update::upcast(bytes.data(), checkpoint::safetensors_float(item.source->dtype), n, upcasted.data());
      update::downcast(upcasted.data(), n, checkpoint::safetensors_float(item.dtype), downcasted.data());
      out = downcasted.data();
    }
    const int64_t length = n * checkpoint::stored_size(item.dtype);
    file.write(at, out, length);
    at += length;
    wrote(length);
  }
}

// The weights and buffers of the checkpoint, those with the largest elements first, so that every tensor is aligned.
// `dtype`: to which weights are converted; ZR_NONE: none is.
std::vector<ExportItem> items_of(const checkpoint::Checkpoint& from, zr_dtype dtype) {
  std::vector<ExportItem> items;
  for (const checkpoint::SavedTensor& tensor : from.manifest().tensors) {
    if (tensor.kind != "weight" && tensor.kind != "buffer") continue;
    const bool converts = tensor.kind == "weight" && dtype != ZR_NONE &&
                          checkpoint::safetensors_float(tensor.dtype) != ZR_NONE &&
                          checkpoint::safetensors_float(tensor.dtype) != dtype;
    const checkpoint::SavedTensor* master = converts ? from.find("master", tensor.name) : nullptr;
    items.push_back(
        {&tensor, master ? master : &tensor, converts ? checkpoint::safetensors_name(dtype) : tensor.dtype});
  }
  std::stable_sort(items.begin(), items.end(), [](const ExportItem& a, const ExportItem& b) {
    return checkpoint::stored_size(a.dtype) > checkpoint::stored_size(b.dtype);
  });
  return items;
}

// Divides the items, in their order, among files of about options.file_bytes each, or puts them into a single file.
std::vector<OutputFile> divide(std::vector<ExportItem> items, const ExportOptions& options) {
  std::vector<OutputFile> files(1);
  for (ExportItem& item : items) {
    int64_t at = files.back().items.empty() ? 0 : files.back().header.tensors.back().end;
    if (!is_single_file(options) && at >= options.file_bytes) {
      files.emplace_back();
      at = 0;
    }
    OutputFile& file = files.back();
    file.header.tensors.push_back({item.tensor->name, item.dtype, item.tensor->shape, at, at + item.bytes()});
    file.header.metadata = {{"format", "pt"}};
    file.items.push_back(std::move(item));
  }
  for (std::size_t k = 0; k < files.size(); ++k) {
    const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", k + 1, files.size());
    files[k].path = is_single_file(options) ? options.to : (fs::path(options.to) / name).string();
  }
  return files;
}

void write_file(const checkpoint::Checkpoint& from, OutputFile& output, File file,
                const std::function<void(int64_t)>& wrote) {
  const std::string header = write_header(output.header);
  file.write(0, header.data(), static_cast<int64_t>(header.size()));
  int64_t at = output.header.data;
  for (const ExportItem& item : output.items) {
    write_item(from, item, file, at, wrote);
    at += item.bytes();
  }
  file.sync();
}

void write_index_file(const std::vector<OutputFile>& outputs, int64_t total_bytes, File file) {
  std::vector<std::pair<std::string, std::string>> weight_map;
  for (const OutputFile& output : outputs)
    for (const ExportItem& item : output.items) weight_map.emplace_back(item.tensor->name, output.name());
  const std::string text = checkpoint::write_index(total_bytes, weight_map);
  file.write(0, text.data(), static_cast<int64_t>(text.size()));
  file.sync();
}

// Logs a warning if the folder has .safetensors files that this export did not write.
void warn_of_other_files(const std::string& folder, const std::vector<OutputFile>& outputs) {
  std::set<std::string> written_names;
  for (const OutputFile& output : outputs) written_names.insert(output.name());
  std::vector<std::string> others;
  for (const std::string& file : list_folder(folder))
    if (file.ends_with(".safetensors") && !written_names.count(file)) others.push_back(file);
  if (!others.empty())
    log(ZR_LOG_WARN,
        fmt::format("{} also contains {}{}, which the new index does not list; remove the files of earlier exports",
                    printable(folder), printable(others.front()),
                    others.size() > 1 ? fmt::format(" and {} more", others.size() - 1) : ""));
}
}  // namespace

void export_weights(const ExportOptions& options) {
  if (options.to.empty())
    fail_user("zeroth export: the output name is empty; name a folder, or a file that ends in .safetensors");
  const checkpoint::Checkpoint from = open_newest(options.from);
  check_destination(options);
  const zr_dtype dtype = options.dtype.empty() ? zr_dtype{ZR_NONE} : float_dtype_named(options.dtype);
  std::vector<ExportItem> items = items_of(from, dtype);
  int64_t total_bytes = 0, done = 0;
  for (const ExportItem& item : items) total_bytes += item.bytes();
  std::vector<OutputFile> outputs = divide(std::move(items), options);

  const bool is_folder = !is_single_file(options);
  for (const OutputFile& output : outputs) check_target(options, from, output.path);
  if (is_folder) check_target(options, from, index_path(options));

  StagedFiles files(options.force);
  if (is_folder) files.make(options.to);
  Progress progress("exporting to " + printable(options.to), total_bytes);
  for (OutputFile& output : outputs)
    write_file(from, output, files.create(output.path), [&](int64_t bytes) { progress.show(done += bytes); });
  if (is_folder) write_index_file(outputs, total_bytes, files.create(index_path(options)));
  files.commit();
  sync_folder(fs::absolute(options.to).parent_path().string());
  if (!is_folder) return;
  sync_folder(options.to);
  warn_of_other_files(options.to, outputs);
}

}  // namespace zr::host::cli
