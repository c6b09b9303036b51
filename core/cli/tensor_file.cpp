#include "cli/tensor_file.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/error.hpp"
#include "base/text.hpp"
#include "checkpoint/safetensors.hpp"

namespace zr::host::cli {

TensorFile read_safetensors(const std::vector<std::string>& files) {
  TensorFile result;
  std::vector<zr_dtype> types;
  std::map<std::string, std::string> file_of;
  for (const std::string& file : files)
    for (checkpoint::StoredTensor& tensor : checkpoint::read_header(file).tensors) {
      const auto [before, is_new] = file_of.emplace(tensor.name, file);
      if (!is_new)
        fail_user(printable(fmt::format("{}: tensor '{}' is also in {}", file, tensor.name, before->second)) +
                  "; give the files of one model, each only once");
      if (tensor.dtype[0] != 'F' && tensor.dtype != "BF16") continue;  // skips integer buffers, such as positions
      int64_t count = 1;
      for (const int64_t size : tensor.shape) count *= size;
      types.push_back(checkpoint::safetensors_float(tensor.dtype));
      result.parameters.push_back({std::move(tensor.name), {}, std::move(tensor.shape), count, false, 0});
    }
  if (result.parameters.empty())
    fail_user(printable(files.front()) + ": the file has no floating-point tensor; give a file with a model's weights");
  if (std::all_of(types.begin(), types.end(), [&](zr_dtype type) { return type == types.front(); }))
    result.dtype = types.front();
  return result;
}

}  // namespace zr::host::cli
