// Which plug-ins a host loads, by the versions of the plug-in ABI.
#include "plugin/abi_version.hpp"

#include <gtest/gtest.h>

namespace zr::host::plugin {
namespace {

constexpr bool kDrafts = true, kNoDrafts = false;

TEST(AbiVersionTest, OrdersByMajorThenMinor) {
  EXPECT_TRUE((AbiVersion{0, 9} == AbiVersion{0, 9}));
  EXPECT_FALSE((AbiVersion{0, 9} == AbiVersion{1, 9}));
  EXPECT_TRUE((AbiVersion{0, 9} < AbiVersion{0, 10}));
  EXPECT_TRUE((AbiVersion{0, 10} < AbiVersion{1, 0}));
  EXPECT_FALSE((AbiVersion{1, 0} < AbiVersion{0, 10}));
  EXPECT_FALSE((AbiVersion{0, 9} < AbiVersion{0, 9}));
}

TEST(AbiVersionTest, HostLoadsItsOwnVersion) {
  for (const AbiVersion version : {AbiVersion{0, 3}, AbiVersion{0, 9}, AbiVersion{0, 10}, AbiVersion{1, 0}}) {
    EXPECT_TRUE(loads(version, version, kNoDrafts));
    EXPECT_TRUE(loads(version, version, kDrafts));
  }
}

TEST(AbiVersionTest, VersionsBelow09MustBeEqual) {
  EXPECT_FALSE(loads({0, 3}, {0, 2}, kNoDrafts));
  EXPECT_FALSE(loads({0, 3}, {0, 4}, kNoDrafts));
  EXPECT_FALSE(loads({0, 9}, {0, 3}, kNoDrafts));
  EXPECT_FALSE(loads({0, 9}, {0, 8}, kNoDrafts));
  EXPECT_FALSE(loads({0, 10}, {0, 8}, kNoDrafts));
}

TEST(AbiVersionTest, HostLoadsOlderVersionsFrom09On) {
  EXPECT_TRUE(loads({0, 10}, {0, 9}, kNoDrafts));
  EXPECT_TRUE(loads({0, 11}, {0, 9}, kNoDrafts));
  EXPECT_TRUE(loads({0, 11}, {0, 10}, kNoDrafts));
}

TEST(AbiVersionTest, HostRejectsNewerVersions) {
  EXPECT_FALSE(loads({0, 9}, {0, 10}, kNoDrafts));
  EXPECT_FALSE(loads({0, 9}, {1, 0}, kNoDrafts));
  EXPECT_FALSE(loads({1, 0}, {1, 1}, kNoDrafts));
  EXPECT_FALSE(loads({1, 0}, {2, 0}, kNoDrafts));
}

TEST(AbiVersionTest, Version10LoadsPluginsFrom09On) {
  EXPECT_TRUE(loads({1, 0}, {0, 9}, kNoDrafts));
  EXPECT_TRUE(loads({1, 0}, {0, 12}, kNoDrafts));
  EXPECT_TRUE(loads({1, 4}, {1, 0}, kNoDrafts));
  EXPECT_FALSE(loads({1, 0}, {0, 8}, kNoDrafts));
}

TEST(AbiVersionTest, PluginWithDraftsNeedsItsOwnVersion) {
  EXPECT_FALSE(loads({0, 10}, {0, 9}, kDrafts));
  EXPECT_FALSE(loads({1, 0}, {0, 9}, kDrafts));
  EXPECT_FALSE(loads({1, 1}, {1, 0}, kDrafts));
  EXPECT_FALSE(loads({0, 9}, {0, 10}, kDrafts));
}

}  // namespace
}  // namespace zr::host::plugin
