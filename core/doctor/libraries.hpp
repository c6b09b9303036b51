// libzeroth.so, which programs link, and the libtorch that the dynamic loader finds for it.
#pragma once

#include <string>
#include <vector>

#include "doctor/check.hpp"

namespace zr::host::doctor {

/// What the dynamic loader finds, without running code of libtorch.
struct LibraryFacts {
  std::string folder;                  // lib/ of the installation
  std::string libzeroth{};             // path; "" if the installation has none
  std::vector<std::string> missing{};  // libraries that the dynamic loader does not find for it
  std::string libtorch{};              // path of libtorch_cpu.so, links resolved
  std::string version{};               // of that libtorch: "2.11.0"; "" if unknown
  std::string built_with{};            // version of libtorch that libzeroth.so was built with
  std::string torch_root{};            // a folder that contains lib/libtorch_cpu.so, if TORCH_ROOT names one
  bool program_has_all = false;        // the program of the examined file has all of its libraries, libtorch too
};
/// The lines about libzeroth.so and libtorch.
Checks library_checks(const LibraryFacts& facts);

/// The version of the libtorch whose libtorch_cpu.so has this path, from the files of its folder; "" if unknown.
std::string torch_version_of(const std::string& libtorch);
/// The major version of the CUDA that it was built with, from the same files ("2.11.0+cu130": 13); 0 for the CPU only.
int torch_cuda_of(const std::string& libtorch);

}  // namespace zr::host::doctor
