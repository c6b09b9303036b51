// What a Program holds for the Engine.
#pragma once

#include <filesystem>

#include "engine/session.hpp"
#include "zr/program.hpp"

namespace zr {

struct Program::State {
  /// Loads, joins, checks. Throws host::Failure; exits if ZR_ASK=schema asks for nothing but `keys`.
  State(const std::string& file, const std::vector<std::string>& overrides, const std::vector<Key>& keys);

  const host::Setup& setup() const { return setup_; }
  /// ZR_ASK=plan: print the plan for job.ranks and stop.
  bool only_plan() const { return setup_.only_plan; }
  const std::filesystem::path& folder() const { return folder_; }

 private:
  host::Setup setup_;
  std::filesystem::path folder_;
};

}  // namespace zr
