#include "doctor/disk.hpp"

#include <gtest/gtest.h>

#include <cerrno>
#include <filesystem>

#include "support/scratch.hpp"
#include "unit/core/doctor/text.hpp"

namespace zr::host::doctor {
namespace {

const JobNeeds kJob{.file = "a.toml"};

FolderFacts roomy(FolderUse use) {
  FolderFacts facts{"folder", "some/where", use};
  facts.existing = "/work/some";
  facts.file_system = {"/work", "ext4"};
  facts.size = 100 * kGiB;
  facts.free = 50 * kGiB;
  return facts;
}

TEST(DoctorFolderTest, ReportsFreeSpaceAndFileSystem) {
  EXPECT_EQ(lines_of(folder_checks(roomy(FolderUse::output), kJob, true)),
            "ok disk/folder: some/where: 50.00 GiB free of 100.00 GiB (file system /work, ext4)\n");
}

TEST(DoctorFolderTest, ReportsAFolderThatCannotBeUsed) {
  FolderFacts facts = roomy(FolderUse::offload);
  facts.error = ENOENT;
  EXPECT_EQ(lines_of(folder_checks(facts, kJob, true)),
            "problem disk/folder: some/where: No such file or directory\n  fix: mkdir -p some/where\n");
  facts.error = ENOTDIR;
  EXPECT_EQ(lines_of(folder_checks(facts, kJob, true)),
            "problem disk/folder: some/where: Not a directory; name another folder\n");
  facts = roomy(FolderUse::checkpoint);
  facts.write_error = EACCES;
  const std::string line =
      "disk/folder: some/where: 50.00 GiB free of 100.00 GiB (file system /work, ext4); this user "
      "cannot write to /work/some (Permission denied), so checkpoints cannot be saved\n";
  EXPECT_EQ(lines_of(folder_checks(facts, kJob, false)), "problem " + line + "  fix: chmod u+wx /work/some\n");
  facts.foreign = true;
  EXPECT_EQ(lines_of(folder_checks(facts, {}, false)),
            "warning " + line + "  fix: sudo chown \"$(id -un)\" /work/some\n");
  facts.write_error = EROFS;
  EXPECT_EQ(folder_checks(facts, kJob, true).front().command, "mount -o remount,rw /work");
}

TEST(DoctorFolderTest, WarnsAboutADiskThatIsNearlyFull) {
  FolderFacts facts = roomy(FolderUse::output);
  facts.free = 10 * kMiB;
  EXPECT_EQ(
      lines_of(folder_checks(facts, kJob, true)),
      "warning disk/folder: some/where: 10.00 MiB free of 100.00 GiB (file system /work, ext4); delete files there, "
      "or name a folder on a larger disk\n");
  facts.free = 0;
  EXPECT_EQ(folder_checks(facts, kJob, true).front().verdict, Verdict::problem);
  facts.size = 0;
  EXPECT_EQ(folder_checks(facts, kJob, true).front().verdict, Verdict::ok) << "the file system reports no size";
}

TEST(DoctorFolderTest, ReportsWhetherOffloadBypassesThePageCache) {
  FolderFacts facts = roomy(FolderUse::offload);
  facts.direct_error = 0;
  EXPECT_EQ(lines_of({folder_checks(facts, kJob, true).back()}),
            "ok disk/folder, O_DIRECT: supported: transfers bypass the page cache\n");
  facts.direct_error = EINVAL;
  facts.file_system.type = "tmpfs";
  EXPECT_EQ(
      lines_of(folder_checks(facts, kJob, true)),
      "warning disk/folder: some/where: 50.00 GiB free of 100.00 GiB (file system /work, tmpfs); this is memory, not "
      "a disk: name a folder on a disk\n"
      "warning disk/folder, O_DIRECT: not supported by tmpfs (Invalid argument), so transfers pass through the page "
      "cache and are slower; name a folder on another file system\n");
}

TEST(DoctorFolderTest, LeavesNothingBehind) {
  const test::Scratch scratch;
  const FolderFacts facts = folder_facts("folder", scratch.folder().string(), FolderUse::offload);
  EXPECT_EQ(facts.error, 0);
  EXPECT_TRUE(facts.direct_error.has_value());
  EXPECT_FALSE(facts.file_system.mount.empty());
  EXPECT_GT(facts.size, 0);
  EXPECT_TRUE(std::filesystem::is_empty(scratch.folder()));
}

TEST(DoctorFolderTest, ExaminesTheNearestParentOfAFolderThatTheJobCreates) {
  const test::Scratch scratch;
  EXPECT_EQ(folder_facts("folder", scratch.path("a/b"), FolderUse::checkpoint).existing, scratch.folder().string());
  EXPECT_EQ(folder_facts("folder", scratch.path("a/b"), FolderUse::checkpoint).error, 0);
  EXPECT_EQ(folder_facts("folder", scratch.path("a/b"), FolderUse::offload).error, ENOENT);
  scratch.write("file", "");
  EXPECT_EQ(folder_facts("folder", scratch.path("file"), FolderUse::output).error, ENOTDIR);
}

TEST(DoctorFileSystemTest, IsTheOneOfTheLongestMountPoint) {
  const std::string mounts =
      "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
      "30 27 8:1 / /mnt rw shared:1 master:2 - xfs /dev/sda rw\n"
      "31 27 8:2 / /mnt\\040two rw - btrfs /dev/sdb rw\n"
      "broken\n";
  EXPECT_EQ(file_system_in(mounts, "/mnt/a").type, "xfs");
  EXPECT_EQ(file_system_in(mounts, "/mnt").mount, "/mnt");
  EXPECT_EQ(file_system_in(mounts, "/mntx").type, "ext4");
  EXPECT_EQ(file_system_in(mounts, "/mnt two/a").type, "btrfs");
  EXPECT_EQ(file_system_in("", "/").type, "");
}

}  // namespace
}  // namespace zr::host::doctor
