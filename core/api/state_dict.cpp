#include "state_dict.hpp"

#include <caffe2/serialize/inline_container.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string_view>
#include <utility>

#include "checkpoint/safetensors.hpp"
#include "checkpoint/state_dict_pickle.hpp"
#include "checkpoint/zip_checksums.hpp"
#include "model/torch_dtype.hpp"

namespace zr {

namespace {

namespace fs = std::filesystem;

constexpr std::size_t kMaxPickleBytes = 100'000'000;  // the list of tensors, without their data

// The records of a file of torch.save(), with verified contents.
class Records {
 public:
  explicit Records(const std::string& file) : file_(file), reader_(file) {
    using host::File;
    for (const auto& [name, checksum] : host::checkpoint::zip_checksums(File(file, File::Mode::read_following_links)))
      checksums_.emplace(name.substr(name.find('/') + 1), checksum);  // all records are in one folder
  }
  bool has(const std::string& name) { return reader_.hasRecord(name); }
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

// The values of a tensor, contiguous.
torch::Tensor values_of(Records& records, const std::string& file, const host::checkpoint::PickledTensor& tensor) {
  const torch::ScalarType type = host::model::torch_type_named(tensor.dtype);
  const auto [data, bytes] = records.read("data/" + tensor.storage);
  if (bytes != static_cast<std::size_t>(tensor.storage_count) * torch::elementSize(type))
    host::fail_user(file + ": is damaged: the storage of '" + tensor.name + "' has " + std::to_string(bytes) +
                    " bytes instead of " + std::to_string(tensor.storage_count) + " elements of " + tensor.dtype);
  return torch::from_blob(data.get(), {tensor.storage_count}, type)
      .as_strided(tensor.shape, tensor.strides, tensor.offset)
      .clone(torch::MemoryFormat::Contiguous);
}

void convert(const std::string& from, const std::string& to) {
  Records records(from);
  if (!records.has("data.pkl"))
    host::fail_user(from + ": has no list of tensors; save it with torch.save(model.state_dict(), file)");
  if (records.has("byteorder"))  // since PyTorch 2.1
    if (const auto [order, length] = records.read("byteorder");
        std::string_view(static_cast<const char*>(order.get()), length) != "little")
      host::fail_user(from +
                      ": was saved on a big-endian machine, and Zeroth reads little-endian values only; load it with "
                      "torch.load() on a little-endian machine, and save it there with torch.save()");
  const auto [pickle, size] = records.read("data.pkl");
  if (size > kMaxPickleBytes)
    host::fail_user(from + ": its list of tensors has " + std::to_string(size) +
                    " bytes, more than any state dictionary; convert the file to safetensors");
  const auto tensors = host::checkpoint::tensors_of_pickle(from, {static_cast<const char*>(pickle.get()), size});
  host::checkpoint::TensorHeader header;
  int64_t end = 0;
  for (const host::checkpoint::PickledTensor& tensor : tensors) {
    int64_t bytes = host::checkpoint::stored_size(tensor.dtype);
    for (const int64_t n : tensor.shape) bytes *= n;
    header.tensors.push_back({tensor.name, tensor.dtype, tensor.shape, end, end + bytes});
    end += bytes;
  }
  std::ofstream out(to, std::ios::binary);
  out << host::checkpoint::write_header(header);
  for (const host::checkpoint::PickledTensor& tensor : tensors) {
    const torch::Tensor values = values_of(records, from, tensor);
    out.write(static_cast<const char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  }
  out.close();
  if (!out)
    host::fail_environment("cannot write " + to + ", the converted " + from +
                           "; free space there, or set TMPDIR to another folder");
}

// Errors of libtorch's reader, such as a damaged archive or a file from before PyTorch 1.6, are errors of the user.
void convert_or_explain(const std::string& from, const std::string& to) {
  try {
    convert(from, to);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    host::fail_user(from + ": cannot be read as a state dictionary of PyTorch: " + text.substr(0, text.find('\n')) +
                    "; save it with torch.save(model.state_dict(), file) of PyTorch 1.6 or later");
  }
}

}  // namespace

Engine::StateDictFile::StateDictFile(host::engine::Session& session, const std::string& file) : path_(file) {
  const host::checkpoint::CheckpointComm peers = session.checkpointer().checkpoint_comm();
  std::string converted;  // rank 0 alone decides, because it alone may see the file
  host::checkpoint::run_on_all_ranks(peers, [&] {
    if (session.rank() != 0 || !host::checkpoint::is_state_dict_file(file)) return;
    std::string folder = (fs::temp_directory_path() / "zeroth-XXXXXX").string();
    if (!::mkdtemp(folder.data()))
      host::fail_environment("cannot create a folder in " + fs::temp_directory_path().string() +
                             " for the converted state dictionary; set TMPDIR to a folder that can be written");
    folder_ = folder;
    converted = folder + "/model.safetensors";
    try {
      convert_or_explain(file, converted);
    } catch (...) {
      remove();
      throw;
    }
  });
  converted = peers.broadcast(converted);
  if (!converted.empty()) path_ = converted;
}

Engine::StateDictFile::~StateDictFile() { remove(); }

void Engine::StateDictFile::remove() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
  folder_.clear();
}

}  // namespace zr
