// What ranks on several hosts transfer in a step, for `zeroth plan --hosts`.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "cli/model_query.hpp"

namespace zr::host::cli {

/// Bits per second of a text such as "10Gbit" or "2.5Gbit". Throws UserError, which names the command and its --link.
double bits_per_second(const std::string& command, const std::string& text);

/// A table for each strategy: bytes per step between hosts and inside them, for exact collectives and for each choice
/// in [communicator] that the job permits; with `link`, in bits per second, the time of the bytes of the busiest host.
/// Throws Error if a plug-in fails.
std::string traffic_table(const ModelQuery& query, const job::HostSizes& hosts, std::optional<double> link,
                          const std::vector<std::string>& strategies);

}  // namespace zr::host::cli
