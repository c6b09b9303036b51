// The names of a process's engines, and whether those that resume continue from one moment of their job.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zr::host {

/// An engine's claim on its run folder within this process; ends with the object. Thread-safe.
class EngineName {
 public:
  /// `name`: "" or letters, digits, '-' and '_', a letter first. Throws Failure(user) for another name, and if an
  /// engine that is alive has the same `run_folder`. `checkpoints`: checkpoint.dir.
  EngineName(const std::string& name, const std::string& run_folder, const std::string& checkpoints);
  ~EngineName();
  EngineName(const EngineName&) = delete;

  /// Steps that this engine has made.
  void at_step(int64_t step);
  /// This engine continues from a checkpoint of that step, saved when others() was `others`.
  void loaded(int64_t step, const std::map<std::string, int64_t>& others);
  /// By name, the steps of the other named engines of this process that save under the same checkpoint.dir.
  std::map<std::string, int64_t> others() const;
  /// A line for each of those engines whose state is of another moment than this engine's: the job ended between their
  /// saves. Engines that trained since they were made are not compared.
  std::vector<std::string> different_moments() const;

 private:
  std::string run_folder_;
};

}  // namespace zr::host
