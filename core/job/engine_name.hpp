// The names of the engines of a process, and a check that engines resume from checkpoints that were saved together.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace zr::host::job {

/// Reserves a run folder for one engine of this process, for the life of the object. Thread-safe.
class EngineName {
 public:
  /// `name`: "", or letters, digits, '-' and '_' with a letter first. Throws UserError for any other name, and if
  /// another existing engine has the same `run_folder`. `checkpoints`: checkpoint.dir.
  EngineName(const std::string& name, const std::string& run_folder, const std::string& checkpoints);
  ~EngineName();
  EngineName(const EngineName&) = delete;

  /// Sets the number of steps that this engine has completed.
  void record_step(int64_t step);
  /// This engine resumes from a checkpoint of `step`, which was saved when steps_of_other_engines() returned `others`.
  void record_load(int64_t step, const std::map<std::string, int64_t>& others);
  /// The steps, by name, of the other named engines of this process that save to the same checkpoint.dir.
  std::map<std::string, int64_t> steps_of_other_engines() const;
  /// A warning for each of those engines whose checkpoint was not saved together with this engine's, for example
  /// because the job ended between their saves. Engines that have trained since their load are not compared.
  std::vector<std::string> mismatch_warnings() const;

 private:
  std::string run_folder_;
};

}  // namespace zr::host::job
