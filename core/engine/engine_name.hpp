// The names of a process's engines.
#pragma once

#include <string>

namespace zr::host {

/// An engine's claim on its run folder within this process; ends with the object. Thread-safe.
class EngineName {
 public:
  /// `name`: "" or letters, digits, '-' and '_', a letter first. Throws Failure(user) for another name, and if an
  /// engine that is alive has the same `run_folder`.
  EngineName(const std::string& name, const std::string& run_folder);
  ~EngineName();
  EngineName(const EngineName&) = delete;

 private:
  std::string run_folder_;
};

}  // namespace zr::host
