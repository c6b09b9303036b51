// The message of the zr::UserError that a call of the public API throws.
#pragma once

#include <functional>
#include <string>

#include "zr/error.hpp"

namespace zr::test {

/// "" if the call throws no UserError; other exceptions pass through.
inline std::string user_error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const UserError& error) {
    return error.what();
  }
  return "";
}

}  // namespace zr::test
