// What a Program holds for the Engine.
#pragma once

#include <filesystem>

#include "engine/setup.hpp"
#include "zr/program.hpp"

namespace zr {

/// Set by the part of the library that sees libtorch: from the call on, this thread's models are built without memory.
extern void (*build_without_memory)();

struct Program::State {
  /// Loads, joins, checks. Throws host::Failure; exits if ZR_ASK=schema asks for nothing but `keys`.
  State(const std::string& file, const std::vector<std::string>& overrides, const std::vector<Key>& keys);

  const host::Setup& setup() const { return setup_; }
  /// ZR_ASK=parameters: print what would be trained, and stop.
  bool prints_parameters() const { return prints_parameters_; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  host::Setup setup_;
  std::filesystem::path folder_;
  bool prints_parameters_ = false;
};

}  // namespace zr
