// A state dictionary of PyTorch as a safetensors file that the checkpoint loader reads.
#pragma once

#include <string>

#include "engine_state.hpp"

namespace zr {

/// Training thread only.
class Engine::StateDictFile {
 public:
  /// If `file` is a state dictionary (is_state_dict_file), rank 0 converts it to a temporary safetensors file. A
  /// failure is thrown on all ranks. Collective.
  StateDictFile(host::engine::Session& session, const std::string& file);
  /// Removes the temporary file.
  ~StateDictFile();
  StateDictFile(const StateDictFile&) = delete;
  /// The file to load: the converted one, or `file` itself if it is not a state dictionary.
  const std::string& path() const { return path_; }

 private:
  void remove();
  std::string path_;
  std::string folder_;  // to remove; "": none on this rank
};

}  // namespace zr
