// The conversion of a state dictionary of PyTorch to a temporary safetensors file.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "checkpoint/safetensors.hpp"
#include "checkpoint/state_dict_pickle.hpp"

namespace zr {

class StateDictRecords;

/// The temporary file has its header and size at once; the values follow in write(). Training thread of rank 0.
class StateDictConversion {
 public:
  /// Reads the list of tensors in the file `from`, and creates the temporary file in TMPDIR. Throws UserError if `from`
  /// cannot be read as a state dictionary, and EnvironmentError if the temporary file cannot be created.
  explicit StateDictConversion(const std::string& from);
  /// Removes the name of the temporary file.
  ~StateDictConversion();
  StateDictConversion(const StateDictConversion&) = delete;

  const std::string& path() const { return path_; }  // of the temporary file
  /// Removes the name of the file, so that nothing stays behind if the process is killed. Ranks that have opened the
  /// file can still read it.
  void remove_name();
  /// Writes the values of these tensors of the state dictionary. Reads each storage once. Throws UserError if a storage
  /// is damaged, and EnvironmentError if there is no space or memory.
  void write(const std::vector<std::string>& names);
  /// Writes the values of all tensors, so that processes on other machines can read them.
  void write_all();

 private:
  void create();
  void reported(const std::function<void()>& work) const;
  void write_view(std::size_t index, void* data, std::size_t bytes);

  const std::unique_ptr<StateDictRecords> records_;
  const std::vector<host::checkpoint::PickledTensor> tensors_;
  host::checkpoint::TensorHeader header_;  // the tensors in the same order
  std::string path_, folder_;              // folder_: to remove; "": removed
  std::optional<host::File> file_;
};

}  // namespace zr
