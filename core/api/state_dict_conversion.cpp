#include "api/state_dict_conversion.hpp"

#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <torch/types.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/zip_checksums.hpp"
#include "model/torch_dtype.hpp"

namespace zr {

namespace fs = std::filesystem;

namespace {
constexpr std::size_t kMaxPickleBytes = 100'000'000;  // the list of tensors, without their data
constexpr int64_t kMaxBytes = int64_t{1} << 43;       // of a temporary file; file systems allow 16 TiB or more
}  // namespace

// The records of a file of torch.save(), with verified contents.
class StateDictRecords {
 public:
  explicit StateDictRecords(const std::string& file) : file_(file), reader_(file) {
    using host::File;
    for (const auto& [name, checksum] : host::checkpoint::zip_checksums(File(file, File::Mode::read_following_links)))
      checksums_.emplace(name.substr(name.find('/') + 1), checksum);  // all records are in one folder
  }
  bool has(const std::string& name) { return reader_.hasRecord(name); }
  const std::string& file() const { return file_; }
  std::pair<at::DataPtr, std::size_t> read(const std::string& name) {
    auto [data, bytes] = reader_.getRecord(name);
    const auto checksum = checksums_.find(name);
    // PyTorch writes 0 if torch.utils.serialization.config.save.compute_crc32 is false.
    if (checksum != checksums_.end() && checksum->second != 0 &&
        checksum->second != host::checkpoint::crc32_of(data.get(), bytes))
      host::fail_user(file_ + ": is damaged: its record '" + name +
                      "' does not have the checksum that the file lists; save or download it again");
    return {std::move(data), bytes};
  }

 private:
  const std::string file_;
  caffe2::serialize::PyTorchStreamReader reader_;
  std::map<std::string, uint32_t> checksums_;
};

namespace {

std::vector<host::checkpoint::PickledTensor> tensors_of(StateDictRecords& records) {
  const std::string& file = records.file();
  if (!records.has("data.pkl"))
    host::fail_user(file + ": has no list of tensors; save it with torch.save(model.state_dict(), file)");
  if (records.has("byteorder")) {  // since PyTorch 2.1
    const auto [data, length] = records.read("byteorder");
    const std::string_view order(static_cast<const char*>(data.get()), length);
    if (order == "big")
      host::fail_user(file +
                      ": was saved on a big-endian machine, and Zeroth reads little-endian values only; load it with "
                      "torch.load() on a little-endian machine, and save it there with torch.save()");
    if (order != "little")
      host::fail_user(file + ": is damaged: its record 'byteorder' is '" +
                      host::printable(std::string(order.substr(0, 20))) +
                      "', neither 'little' nor 'big'; save it again");
  }
  const auto [pickle, size] = records.read("data.pkl");
  if (size > kMaxPickleBytes)
    host::fail_user(file + ": its list of tensors has " + std::to_string(size) +
                    " bytes, more than any state dictionary; convert the file to safetensors");
  return host::checkpoint::tensors_of_pickle(file, {static_cast<const char*>(pickle.get()), size});
}

// The safetensors header for these tensors. Errors name the file of the user, not the temporary file.
host::checkpoint::TensorHeader header_of(const std::string& file,
                                         const std::vector<host::checkpoint::PickledTensor>& tensors) {
  host::checkpoint::TensorHeader header;
  int64_t end = 0;
  for (const host::checkpoint::PickledTensor& tensor : tensors) {
    if (tensor.name == "__metadata__" || host::find_not_utf8(tensor.name) != std::string::npos)
      host::fail_user(file + ": cannot load a tensor with the name '" + host::printable(tensor.name) +
                      "', which the safetensors format does not allow; save the file without this tensor, or under "
                      "another name");
    int64_t bytes = host::checkpoint::stored_size(tensor.dtype);
    bool fits = true;
    for (const int64_t n : tensor.shape) fits = fits && !__builtin_mul_overflow(bytes, n, &bytes);
    header.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, end, end + (fits ? bytes : 0)});
    if (!fits || __builtin_add_overflow(end, bytes, &end) || end > kMaxBytes)
      host::fail_user(file + ": its tensors up to '" + host::printable(tensor.name) + "' have more than " +
                      host::bytes_text(kMaxBytes) +
                      " as contiguous tensors; save them without expand(), and only those of the model");
  }
  return header;
}

// Errors of libtorch's reader, such as a damaged archive or a file from before PyTorch 1.6, are errors of the user.
template <class F>
auto explained(const std::string& file, F&& work) {
  try {
    return work();
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    if (text.find("allocate memory") != text.npos)
      host::fail_environment(file + ": cannot be converted: " + host::first_line(text) +
                             "; free memory on the node of rank 0, or convert the file to safetensors");
    host::fail_user(file + ": cannot be read as a state dictionary of PyTorch: " + host::first_line(text) +
                    "; save it with torch.save(model.state_dict(), file) of PyTorch 1.6 or later");
  }
}

}  // namespace

StateDictConversion::StateDictConversion(const std::string& from)
    : records_(explained(from, [&] { return std::make_unique<StateDictRecords>(from); })),
      tensors_(explained(from, [&] { return tensors_of(*records_); })),
      header_(header_of(from, tensors_)) {
  const std::string bytes = host::checkpoint::write_header(header_);
  if (header_.data > host::checkpoint::kMaxHeaderBytes)
    host::fail_user(from + ": has too many tensors (" + std::to_string(tensors_.size()) +
                    "); convert the file to safetensors, in several files");
  const int64_t end = header_.tensors.empty() ? 0 : header_.tensors.back().end;
  create();
  try {
    reported([&] {
      file_->resize(header_.data + end);
      file_->write(0, bytes.data(), std::ssize(bytes));
    });
  } catch (...) {
    remove_name();
    throw;
  }
}

StateDictConversion::~StateDictConversion() { remove_name(); }

void StateDictConversion::remove_name() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
  folder_.clear();
}

void StateDictConversion::write_all() {
  std::vector<std::string> names;
  for (const host::checkpoint::PickledTensor& tensor : tensors_) names.push_back(tensor.name);
  write(names);
  reported([&] { file_->sync(); });
}

void StateDictConversion::write(const std::vector<std::string>& names) {
  std::unordered_map<std::string, std::size_t> indices;
  for (std::size_t i = 0; i < tensors_.size(); ++i) indices.emplace(tensors_[i].name, i);
  std::map<std::string, std::vector<std::size_t>> by_storage;
  for (const std::string& name : names) by_storage[tensors_[indices.at(name)].storage].push_back(indices.at(name));
  for (const std::string& name : names) {
    const host::checkpoint::StoredTensor& to = header_.tensors[indices.at(name)];
    if (to.end > to.begin) reported([&] { file_->reserve(header_.data + to.begin, to.end - to.begin); });
  }
  const torch::NoGradGuard no_grad;
  for (const auto& [key, views] : by_storage)
    explained(records_->file(), [&, &key = key, &views = views] {
      const auto [data, bytes] = records_->read("data/" + key);
      for (const std::size_t i : views) write_view(i, data.get(), bytes);
    });
}

void StateDictConversion::create() {
  std::error_code error;
  const char* variable = std::getenv("TMPDIR");
  const std::string parent = variable && *variable ? variable : "/tmp", named = host::printable(parent);
  folder_ = parent + "/zeroth-XXXXXX";
  if (!::mkdtemp(folder_.data())) error.assign(errno, std::generic_category());
  if (error) folder_.clear();
  path_ = folder_ + "/model.safetensors";
  const int fd = error ? -1 : ::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (fd < 0) {
    if (!error) error.assign(errno, std::generic_category());
    remove_name();
    host::fail_environment(records_->file() + ": cannot create a temporary file in " + named +
                           " for the converted state dictionary: " + error.message() +
                           "; set TMPDIR to a folder that can be written");
  }
  file_.emplace("the temporary file in " + named, fd);
}

// Runs `work`, whose errors are about the temporary file.
void StateDictConversion::reported(const std::function<void()>& work) const {
  try {
    work();
  } catch (const EnvironmentError& error) {
    host::fail_environment(records_->file() + ": cannot be converted: " + error.what() + " (TMPDIR)");
  }
}

// `data`: the storage of the tensor.
void StateDictConversion::write_view(std::size_t index, void* data, std::size_t bytes) {
  const host::checkpoint::PickledTensor& tensor = tensors_[index];
  const torch::ScalarType type = host::model::torch_type_named(tensor.dtype);
  if (bytes != static_cast<std::size_t>(tensor.storage_count) * torch::elementSize(type))
    host::fail_user(records_->file() + ": is damaged: the storage of '" + tensor.name + "' has " +
                    std::to_string(bytes) + " bytes instead of " + std::to_string(tensor.storage_count) +
                    " elements of " + tensor.dtype);
  const torch::Tensor view =
      torch::from_blob(data, {tensor.storage_count}, type).as_strided(tensor.shape, tensor.strides, tensor.offset);
  const torch::Tensor values = (tensor.negative ? view.neg() : view).contiguous();
  reported([&] {
    file_->write(header_.data + header_.tensors[index].begin, values.data_ptr(), static_cast<int64_t>(values.nbytes()));
  });
}

}  // namespace zr
