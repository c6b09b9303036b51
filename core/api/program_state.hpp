// The state that zr::Program shares with zr::Engine.
#pragma once

#include <filesystem>
#include <functional>

#include "job/setup.hpp"
#include "zr/program.hpp"

namespace zr {

/// Makes this thread build all further models without allocating parameters. Null in programs without libtorch: the
/// part of the library that includes libtorch sets it.
extern void (*build_without_memory)();

/// host::model::load_device_library(), by the same means.
extern void (*load_device_library)(const std::string& device, const std::string& library);

struct Program::State {
  /// Parses the configuration with these overrides.
  using Load = std::function<host::config::Document(const std::vector<std::string>& overrides)>;
  /// Joins the job and validates the configuration. Throws Error. If the process was started for its keys
  /// (control/program_request.hpp), prints `keys` and throws ExitRequest. `folder`: of the configuration's file.
  State(Load load, std::filesystem::path folder, const std::vector<std::string>& overrides,
        const std::vector<Key>& keys, const std::optional<Rendezvous>& where);

  const host::job::Setup& setup() const { return setup_; }
  /// True if the process was started for the model's parameters: the Engine prints them and throws ExitRequest.
  bool prints_parameters() const { return prints_parameters_; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  host::job::Setup setup_;
  std::filesystem::path folder_;
  bool prints_parameters_ = false;
};

}  // namespace zr
