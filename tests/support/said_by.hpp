// The message that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/error.hpp"

namespace zr::test {

/// The message of the Error that `call` throws; "nothing" if it does not throw. Expects the exit code `exit`.
template <class Call>
std::string said_by(Call&& call, int exit = exit_code::user) {
  try {
    call();
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit);
    return failure.what();
  }
  return "nothing";
}

}  // namespace zr::test
