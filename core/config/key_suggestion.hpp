// What to suggest for a name that is not a key.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace zr::host::config {

/// The last part of a dotted path: "steps" of "train.steps".
std::string last_part(const std::string& path);
/// "table.name", or "name" if the table is "".
std::string join(const std::string& table, std::string_view name);

/// "; did you mean 'train.steps'?"; several names are joined by "or".
std::string did_you_mean(const std::vector<std::string>& near);
/// The end of an error about the unknown key or table `path`: what to set for a name of another system, "; did you mean
/// 'train.steps'?", or the names that the table of `path` has; "" if that table does not exist and no candidate is
/// near.
std::string key_suggestion(const std::string& path, const std::vector<std::string>& candidates);

}  // namespace zr::host::config
