// Whether the dynamic loader finds the libraries of a program, before a rank of it is started.
#pragma once

#include <string>
#include <vector>

namespace zr::host {

/// Names of the shared libraries that the dynamic loader does not find for `program` with this process's environment.
/// Empty for a script, a static program, one that names a loader which is none of the system's, and a file that cannot
/// be read. Nothing of the program runs.
std::vector<std::string> missing_libraries(const std::string& program);

/// Makes sure that the programs this process starts find what `program` needs: missing libraries that the installation
/// of this `zeroth` has (libzeroth.so in its lib/, libtorch in lib/libtorch/lib), for example because it was moved
/// after the program was linked, are found through LD_LIBRARY_PATH from then on, and a log line says so. Throws
/// Failure(environment) that names what is still missing. Main thread only, before other threads exist: it changes the
/// environment.
void provide_libraries(const std::string& program);

}  // namespace zr::host
