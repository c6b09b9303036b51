// Names that keys have in other systems, for messages about unknown keys and for docs/coming-from.md.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace zr::host::config {

struct ForeignKey {
  std::string_view names;   // the last parts of paths, separated by spaces
  std::string_view remedy;  // what to set: "set train.steps"
};

/// All of them, in the order of the document.
std::span<const ForeignKey> foreign_keys();
/// The remedy for an unknown key or table `path`, by its last part in lower case; "" if no other system is known to
/// have it.
std::string_view foreign_remedy(std::string_view path);

}  // namespace zr::host::config
