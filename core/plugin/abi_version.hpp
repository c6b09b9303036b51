// Which plug-ins a host loads, by the versions of the plug-in ABI.
#pragma once

#include <tuple>

namespace zr::host::plugin {

/// A version of the plug-in ABI.
struct AbiVersion {
  unsigned major = 0, minor = 0;
  friend constexpr bool operator==(const AbiVersion& a, const AbiVersion& b) {
    return std::tie(a.major, a.minor) == std::tie(b.major, b.minor);
  }
  friend constexpr bool operator<(const AbiVersion& a, const AbiVersion& b) {
    return std::tie(a.major, a.minor) < std::tie(b.major, b.minor);
  }
};

/// The first version whose plug-ins later hosts load. Below it, versions must be equal.
inline constexpr AbiVersion kFirstStable{0, 9};

/// True if a host of version `host` loads a plug-in that needs version `needed`. `drafts`: the plug-in uses draft
/// headers, which only a host of the same version understands.
constexpr bool loads(const AbiVersion& host, const AbiVersion& needed, bool drafts) {
  if (host == needed) return true;
  return !drafts && !(needed < kFirstStable) && needed < host;
}

}  // namespace zr::host::plugin
