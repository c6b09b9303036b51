// Bits and values of plug-ins that the engine does not know.
#include "base/unknown_bits.hpp"

#include <gtest/gtest.h>

namespace zr::host {
namespace {

constexpr uint64_t kFirst = 1, kThird = 4;

TEST(UnknownBitsTest, AcceptsKnownBits) {
  EXPECT_EQ(unknown_bits_problem("flags", 0, kFirst | kThird), "");
  EXPECT_EQ(unknown_bits_problem("flags", kThird, kFirst | kThird), "");
  EXPECT_EQ(unknown_bits_problem("flags", kFirst | kThird, kFirst | kThird), "");
}

TEST(UnknownBitsTest, NamesTheMemberAndTheUnknownBitsOnly) {
  EXPECT_EQ(unknown_bits_problem("needs", kFirst | 2 | 8, kFirst | kThird),
            "needs has bits that this zeroth does not know (0xa); install a newer zeroth, or a plug-in for this one");
}

TEST(UnknownBitsTest, ReportsTheHighestBit) {
  EXPECT_EQ(
      unknown_bits_problem("flags", uint64_t{1} << 63, kFirst),
      "flags has bits that this zeroth does not know (0x8000000000000000); install a newer zeroth, or a plug-in for "
      "this one");
}

TEST(UnknownBitsTest, ReservedMembersAreZero) {
  EXPECT_EQ(reserved_problem("rsv", 0), "");
  EXPECT_EQ(reserved_problem("rsv", 1),
            "rsv has bits that this zeroth does not know (0x1); install a newer zeroth, or a plug-in for this one");
}

}  // namespace
}  // namespace zr::host
