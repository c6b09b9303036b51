// What `zeroth doctor FILE` knows about the job of a file without starting its program.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "doctor/disk.hpp"
#include "doctor/needs.hpp"

namespace zr::host::cli {

/// The job of a file.
struct ExaminedJob {
  doctor::JobNeeds needs{};
  doctor::Checks checks{};                     // of the file, its plug-ins and its program
  std::vector<doctor::FolderFacts> folders{};  // that the job writes to
  bool program_has_all = false;                // its libraries
  int code = 0;                                // exit code of the first error; 0 without errors
};

/// Validates the file, loads its plug-ins, and finds its program and the program's libraries. Errors become checks.
ExaminedJob examine_job(const std::string& file, const std::vector<std::string>& overrides,
                        const std::filesystem::path& bin);

}  // namespace zr::host::cli
