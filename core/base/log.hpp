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

}  // namespace zr::host
