// zeroth: see commands.cpp.
#include "base/log.hpp"
#include "cli/commands.hpp"

int main(int argc, char** argv) {
  try {
    return zr::host::run_command({argv + 1, argv + argc});
  } catch (...) {
    return zr::host::report_exception();
  }
}
