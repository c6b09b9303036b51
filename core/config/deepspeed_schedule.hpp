// DeepSpeed's names of schedules: what to write for the same rates. Internal to core/config.
#pragma once

#include <toml++/toml.h>

#include <optional>
#include <string>

namespace zr::host::config {

/// The problem with DeepSpeed's name of a schedule at `path`, "schedule.use" or "schedule.<name>"; for schedule.use
/// with keys for the same rates. nullopt if there is no such name. "" for the table of a schedule that schedule.use
/// names, where the problem is reported.
std::optional<std::string> deepspeed_schedule_problem(const toml::table& root, const std::string& path);

}  // namespace zr::host::config
