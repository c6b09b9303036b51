// The message that a call throws.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/failure.hpp"

namespace zr::test {

/// The message of the Failure that `call` throws; "nothing" if it does not throw. Expects the exit code `exit`.
template <class Call>
std::string said_by(Call&& call, host::Exit exit = host::Exit::user) {
  try {
    call();
  } catch (const host::Failure& failure) {
    EXPECT_EQ(failure.exit(), exit);
    return failure.what();
  }
  return "nothing";
}

}  // namespace zr::test
