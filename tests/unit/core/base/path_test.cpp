#include "base/path.hpp"

#include <gtest/gtest.h>

#include <filesystem>

#include "base/cores.hpp"
#include "support/environment_variable.hpp"
#include "support/said_by.hpp"
#include "support/scratch.hpp"

namespace zr::host {
namespace {

std::string absolute(const std::string& text, const std::string& base) {
  std::string problem, path = absolute_path(text, base, problem);
  return problem.empty() ? path : "problem: " + problem;
}

TEST(PathTest, RelativePathsStartAtTheBase) {
  EXPECT_EQ(absolute("runs/./a/", "/base"), "/base/runs/a");
  EXPECT_EQ(absolute("/data/x", "/base"), "/data/x");
  EXPECT_EQ(absolute("./~odd", "/base"), "/base/~odd");
  EXPECT_EQ(absolute(".", "/base"), "/base");
}

TEST(PathTest, DotsAreResolvedThroughLinks) {
  const test::Scratch scratch;
  const std::filesystem::path folder = std::filesystem::canonical(scratch.folder());
  std::filesystem::create_directories(folder / "far/away");
  std::filesystem::create_symlink(folder / "far/away", folder / "link");
  EXPECT_EQ(absolute("link/../x", folder.string()), (folder / "far/x").string());
}

TEST(PathTest, TildeIsTheHomeFolder) {
  const test::EnvironmentVariable home("HOME");
  home.set("/home/me");
  EXPECT_EQ(absolute("~", "/base"), "/home/me");
  EXPECT_EQ(absolute("~/a/b", "/base"), "/home/me/a/b");
  EXPECT_EQ(absolute("~root/x", "/base"), "/root/x");
  EXPECT_EQ(absolute("~no-such-user/x", "/base"),
            "problem: there is no user 'no-such-user' with a home folder; write an absolute path, or ./~no-such-user/x "
            "for a file of that name");
  EXPECT_EQ(with_home("~/a"), "/home/me/a");
  EXPECT_EQ(with_home("a/~"), "a/~");
  EXPECT_EQ(test::said_by([] { with_home("~no-such-user"); }),
            "'~no-such-user': there is no user 'no-such-user' with a home folder; write an absolute path, or "
            "./~no-such-user for a file of that name");
}

TEST(UsableCoresTest, SmallestQuotaOfTheControlGroupsLimitsTheCores) {
  const test::Scratch root;
  root.write("proc/self/cgroup", "0::/a/b\n");
  root.write("sys/fs/cgroup/a/cpu.max", "50000 100000\n");
  root.write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  const UsableCores cores = usable_cores(root.folder().string());
  EXPECT_EQ(cores.quota, 0.5);
  EXPECT_EQ(cores.whole(), 1);
  EXPECT_EQ(cores.group, "/sys/fs/cgroup/a");
  const test::Scratch older;
  older.write("proc/self/cgroup", "4:cpu,cpuacct:/box\n");
  older.write("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us", "250000\n");
  older.write("sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(usable_cores(older.folder().string()).quota, 2.5);
}

TEST(UsableCoresTest, WholeCoresRespectQuotaAndAffinity) {
  EXPECT_EQ((UsableCores{8, 2.5, "/g"}).whole(), 2);
  EXPECT_EQ((UsableCores{8, -1, ""}).whole(), 8);
  EXPECT_EQ((UsableCores{2, 16, "/g"}).whole(), 2);
  EXPECT_EQ(quota_text({8, 2.5, "/g"}), "the quota of control group /g is 2.5 of 8 cores");
  EXPECT_EQ(quota_text({2, 16, "/g"}), "");
}

}  // namespace
}  // namespace zr::host
