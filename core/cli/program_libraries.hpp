// Checks that the dynamic loader finds the libraries of a program, before the program is started.
#pragma once

#include <string>
#include <vector>

namespace zr::host::cli {

/// A shared library that a file needs, directly or not.
struct LinkedLibrary {
  std::string name, path;  // path: "" if the dynamic loader does not find it
};
/// The shared libraries of a program or a shared library, as the dynamic loader finds them in the environment of this
/// process. Empty for a script, a static program, a program whose loader is not one of the system's, and a file that
/// cannot be read. Does not run the file.
std::vector<LinkedLibrary> linked_libraries(const std::string& file);

/// The names of the shared libraries that the dynamic loader does not find for `program`; see linked_libraries().
std::vector<std::string> missing_libraries(const std::string& program);

/// Makes processes that this process starts find the libraries of `program`. If some are missing and the installation
/// of this `zeroth` has them (libzeroth.so in lib/, libtorch in lib/libtorch/lib), for example because it was moved
/// after the program was linked, adds their folders to LD_LIBRARY_PATH and logs this. Throws EnvironmentError with
/// the names of libraries that are still missing. Call it on the main thread before other threads exist, because it
/// changes the environment.
void provide_libraries(const std::string& program);

}  // namespace zr::host::cli
