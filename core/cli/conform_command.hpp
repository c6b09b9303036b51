// `zeroth conform`: checks a plug-in against the rules of the ABI.
#pragma once

#include <boost/program_options.hpp>

#include "cli/command.hpp"

namespace zr::host::cli {

/// Adds the options of the command.
void conform_options(boost::program_options::options_description& options);

/// Checks the file, prints the results, and returns 0, or exit_code::user if a rule does not hold or nothing was
/// checked. Throws Error.
int conform_plugin(const Command& command, const Parsed& parsed);

}  // namespace zr::host::cli
