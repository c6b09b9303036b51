// What a call throws, for tests of messages.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "base/failure.hpp"

namespace zr::test {

/// The message of the Failure that `call` throws, which must have this exit code; "nothing" if it throws none.
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
