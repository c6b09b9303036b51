// A state dictionary of PyTorch as a safetensors file that the checkpoint loader reads.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "api/engine_state.hpp"
#include "api/state_dict_conversion.hpp"

namespace zr {

/// Training thread only.
class Engine::StateDictFile {
 public:
  /// If `file` is a state dictionary (is_state_dict_file), rank 0 creates a temporary safetensors file with its
  /// tensors. If all ranks run on one machine, the file has no values yet. A failure is thrown on all ranks.
  /// Collective.
  StateDictFile(host::engine::Session& session, const std::string& file);
  /// Removes the temporary file.
  ~StateDictFile();
  StateDictFile(const StateDictFile&) = delete;
  /// The file to load: the temporary one, or `file` itself if it is not a state dictionary.
  const std::string& path() const { return path_; }
  /// Writes the values of the tensors with these names. All ranks have opened the file: it loses its name first. A
  /// failure is thrown on all ranks. Collective.
  void provide(const std::vector<std::string>& names);

 private:
  const host::checkpoint::CheckpointComm peers_;
  std::string path_;
  // Null on other ranks than 0, and if `file` is not a state dictionary.
  std::unique_ptr<StateDictConversion> conversion_;
  bool complete_ = false;  // the file has all values
};

}  // namespace zr
