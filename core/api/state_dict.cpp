#include "state_dict.hpp"

#include <torch/csrc/jit/serialization/pickle.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>

#include "base/log.hpp"
#include "base/text.hpp"
#include "checkpoint/safetensors.hpp"
#include "engine/saver.hpp"

namespace zr {

namespace {

namespace fs = std::filesystem;

bool is_state_dict(const std::string& file) {
  const std::string extension = fs::path(file).extension().string();
  return (extension == ".pt" || extension == ".pth" || extension == ".bin") && fs::is_regular_file(file);
}

const char* safetensors_name(torch::ScalarType type) {
  switch (type) {
    case torch::kFloat: return "F32";
    case torch::kDouble: return "F64";
    case torch::kHalf: return "F16";
    case torch::kBFloat16: return "BF16";
    case torch::kLong: return "I64";
    case torch::kInt: return "I32";
    case torch::kShort: return "I16";
    case torch::kChar: return "I8";
    case torch::kByte: return "U8";
    case torch::kBool: return "BOOL";
    default: return nullptr;
  }
}

c10::IValue unpickled(const std::string& file) {
  std::ifstream in(file, std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(in)), {});
  if (!in.is_open() || in.bad()) host::fail_environment(file + ": cannot be read; check the path and its permissions");
  try {
    return torch::jit::pickle_load(bytes);
  } catch (const c10::Error& error) {
    const std::string text = error.what_without_backtrace();
    host::fail_user(file + ": cannot be read as a state dictionary of PyTorch: " + text.substr(0, text.find('\n')) +
                    "; save it with torch.save(model.state_dict(), file), or convert it to safetensors");
  }
}

// The tensors of the dictionary by name. The dictionary may be the value of "state_dict" or "model" in an outer one.
std::vector<std::pair<std::string, torch::Tensor>> tensors_of(const std::string& file) {
  c10::IValue value = unpickled(file);
  if (value.isGenericDict())
    for (const char* name : {"state_dict", "model"}) {
      const auto dict = value.toGenericDict();
      if (const auto found = dict.find(c10::IValue(name)); found != dict.end() && found->value().isGenericDict()) {
        value = found->value();
        break;
      }
    }
  if (!value.isGenericDict())
    host::fail_user(file + ": contains no dictionary of tensors; save it with torch.save(model.state_dict(), file)");
  std::vector<std::pair<std::string, torch::Tensor>> tensors;
  for (const auto& entry : value.toGenericDict()) {
    if (!entry.key().isString() || !entry.value().isTensor())
      host::fail_user(file + ": the dictionary has the entry '" +
                      host::printable(entry.key().isString() ? entry.key().toStringRef() : "?") +
                      "', which is no tensor; save only the state_dict() of the model");
    tensors.emplace_back(entry.key().toStringRef(), entry.value().toTensor());
  }
  return tensors;
}

void write_safetensors(const std::string& from, const std::string& file) {
  const auto tensors = tensors_of(from);
  host::TensorHeader header;
  int64_t end = 0;
  for (const auto& [name, tensor] : tensors) {
    const char* dtype = safetensors_name(tensor.scalar_type());
    if (!dtype)
      host::fail_user(from + ": tensor '" + host::printable(name) + "' has the dtype " +
                      c10::toString(tensor.scalar_type()) + ", which safetensors files do not have; convert it");
    const int64_t begin = end;
    end += static_cast<int64_t>(tensor.numel() * tensor.element_size());
    header.tensors.push_back({name, dtype, tensor.sizes().vec(), begin, end});
  }
  std::ofstream out(file, std::ios::binary);
  out << host::write_header(header);
  for (const auto& [name, tensor] : tensors) {
    const torch::Tensor values = tensor.cpu().contiguous();
    out.write(static_cast<const char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
  }
  out.close();
  if (!out)
    host::fail_environment("cannot write " + file + ", the converted " + from +
                           "; free space there, or set TMPDIR to another folder");
}

}  // namespace

Engine::StateDictFile::StateDictFile(host::Session& session, const std::string& file) : path_(file) {
  if (!is_state_dict(file)) return;
  const host::CheckpointComm peers = session.checkpointer().peers();
  host::run_on_all_ranks(peers, [&] {
    if (session.rank() != 0) return;
    std::string folder = (fs::temp_directory_path() / "zeroth-XXXXXX").string();
    if (!::mkdtemp(folder.data()))
      host::fail_environment("cannot create a folder in " + fs::temp_directory_path().string() +
                             " for the converted state dictionary; set TMPDIR to a folder that can be written");
    folder_ = folder;
    path_ = folder + "/model.safetensors";
    write_safetensors(file, path_);
  });
  path_ = peers.broadcast(path_);
}

Engine::StateDictFile::~StateDictFile() {
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

}  // namespace zr
