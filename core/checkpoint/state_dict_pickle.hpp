// The pickled part of a file that torch.save() wrote: which tensors a state dictionary has, and where their data is.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace zr::host::checkpoint {

/// Whether the name of `path` ends in .pt, .pth, .bin or .ckpt (in any case).
bool has_state_dict_extension(const std::string& path);

/// Whether `path` is a regular file that torch.save() may have written: it has such a name, or it is a zip archive.
bool is_state_dict_file(const std::string& path);

/// A tensor of a state dictionary: a strided view of a storage, which is a record of the file.
struct PickledTensor {
  std::string name;
  std::string dtype;                    // as in safetensors files: "F32"
  std::string storage;                  // the key of the record: "0" for data/0
  int64_t storage_count = 0;            // elements of the storage
  int64_t offset = 0;                   // first element in the storage
  std::vector<int64_t> shape, strides;  // in elements; all positions are inside the storage
  bool negative = false;                // the values are those of the storage times -1 (torch._neg_view)
};

/// The tensors of the dictionary of names and tensors in `pickle`, in its order. The dictionary may be the value of
/// "state_dict", or else of "model", in an outer one. No code of the file runs: the only objects are dictionaries,
/// lists, tuples, numbers, texts, storages and tensors. The names are unique. Throws UserError naming `file` if the
/// pickle is damaged, or contains anything else.
std::vector<PickledTensor> tensors_of_pickle(const std::string& file, std::string_view pickle);

}  // namespace zr::host::checkpoint
