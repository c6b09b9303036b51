// Lines for a person, on standard error: "zeroth: text", "zeroth: warning: text". Thread-safe.
#pragma once

#include <string>

#include "zr/abi/host.h"

namespace zr::host {

/// Writes one line if `level` (ZR_LOG_*) is at least the threshold; ZR_LOG=debug|info|warn|error sets it, info by
/// default. Control characters other than newline and tab are escaped (printable()); names from files and peers are
/// escaped by their caller, newlines too.
void log(int level, const std::string& text);
/// Ranks above 0 keep silent below warnings: called once the rank is known.
void log_as_rank(int rank);
/// Inside a catch block: writes the exception in flight as an error and returns the process's exit code for it.
int report_exception();
/// The same where a program built on zr::Engine ends: an exception that is not ours is the program's own (exit code 1;
/// std::invalid_argument 2). libtorch's C++ stack is left out unless TORCH_SHOW_CPP_STACKTRACES=1.
int report_program_exception();
/// What to do about an exception of the program's own, given its type and text; "" if unknown. Replaces the one before.
void set_advice(std::string (*advice)(const std::string& type, const std::string& text));

}  // namespace zr::host
