// The machine profile: stored, found again by file system, and ignored if it is broken.
#include "job/machine_profile.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "support/scratch.hpp"

namespace {

using namespace zr::host;
using zr::Error;
using zr::test::Scratch;

job::DiskProfile disk(const std::string& mount, uint64_t device, int64_t block_bytes) {
  return {{mount, device}, block_bytes, 16, 2.5e9, 1.25e9, 1.5e9, "2026-01-31T12:00:00Z"};
}
// The text that fn() prints on standard error.
template <class F>
std::string said(F&& fn) {
  ::testing::internal::CaptureStderr();
  fn();
  return ::testing::internal::GetCapturedStderr();
}

class MachineProfileTest : public ::testing::Test {
 protected:
  ~MachineProfileTest() override { ::unsetenv("ZR_MACHINE_PROFILE"); }
  const Scratch scratch;
  const std::string file = scratch.path("cache/zeroth/machine.json");
};

TEST_F(MachineProfileTest, RoundTripsThroughItsFile) {
  job::MachineProfile profile(file);
  profile.put(disk("/a \"b\"", 7, 4096));
  profile.put(disk("/", uint64_t{1} << 63, 1 << 20));
  profile.save();
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(scratch.path("cache/zeroth")), {}), 1);
  const job::MachineProfile again(file);
  const job::DiskProfile* found = again.find({"/", uint64_t{1} << 63});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->block_bytes, 1 << 20);
  EXPECT_EQ(found->depth, 16);
  EXPECT_EQ(found->read, 2.5e9);
  EXPECT_EQ(found->write, 1.25e9);
  EXPECT_EQ(found->mixed, 1.5e9);
  EXPECT_EQ(found->date, "2026-01-31T12:00:00Z");
  EXPECT_TRUE(again.find({"/a \"b\"", 7}));
}

TEST_F(MachineProfileTest, IdentifiesAFileSystemByDeviceAndMountPoint) {
  job::MachineProfile profile(file);
  profile.put(disk("/scratch", 7, 4096));
  EXPECT_FALSE(profile.find({"/scratch", 8}));
  EXPECT_FALSE(profile.find({"/", 7}));
  profile.put(disk("/scratch", 8, 8192));  // another disk is mounted there now
  EXPECT_FALSE(profile.find({"/scratch", 7}));
  EXPECT_EQ(profile.find({"/scratch", 8})->block_bytes, 8192);
}

TEST_F(MachineProfileTest, FindsTheFileSystemOfAMissingPath) {
  std::filesystem::create_directories(scratch.folder() / "a/b");
  const job::FileSystem at = job::file_system_of(scratch.path("a/b"));
  EXPECT_EQ(at, job::file_system_of(scratch.path("a/../a")));
  EXPECT_EQ(at, job::file_system_of(at.mount));
  EXPECT_EQ(scratch.folder().string().rfind(at.mount, 0), 0u);
  EXPECT_NE(job::file_system_of("/proc"), at);
  EXPECT_EQ(job::file_system_of("/proc/self/task").mount, "/proc");
  EXPECT_THROW(job::file_system_of(scratch.path("nowhere")), Error);
}

TEST_F(MachineProfileTest, IgnoresABrokenFileAndWarnsOnce) {
  int n = 0;
  for (const char* text :
       {"", "{", "[]", "{\"format\": 2, \"disks\": []}", "{\"format\": 1, \"disks\": [{\"mount\": 3}]}",
        "{\"format\": 1, \"disks\": [{\"mount\": \"/\", \"device\": 7, \"block_bytes\": 0, \"depth\": 8, \"read\": 1, "
        "\"write\": 1, \"mixed\": 1, \"date\": \"\"}]}"}) {
    const std::string broken = scratch.write("broken" + std::to_string(n++) + ".json", text);
    const std::string first = said([&] { EXPECT_FALSE(job::MachineProfile(broken).find({"/", 7})) << text; });
    EXPECT_EQ(first.rfind("zeroth: warning: " + broken + ": not a valid machine profile (", 0), 0u) << first;
    EXPECT_EQ(said([&] { EXPECT_FALSE(job::MachineProfile(broken).find({"/", 7})); }), "");
  }
  const std::string broken = scratch.path("broken0.json");  // a new measurement replaces the broken file
  job::MachineProfile profile(broken);
  profile.put(disk("/", 7, 4096));
  profile.save();
  EXPECT_TRUE(job::MachineProfile(broken).find({"/", 7}));
  EXPECT_EQ(said([&] { job::MachineProfile(scratch.path("none.json")); }), "");
}

TEST_F(MachineProfileTest, FindsItsPathInTheEnvironment) {
  const auto where = [](const char* named, const char* cache, const char* home) {
    for (const auto& [name, value] :
         {std::pair{"ZR_MACHINE_PROFILE", named}, {"XDG_CACHE_HOME", cache}, {"HOME", home}})
      value ? ::setenv(name, value, 1) : ::unsetenv(name);
    return job::MachineProfile::default_file();
  };
  const char* home = std::getenv("HOME");
  const std::string before = home ? home : "/";
  EXPECT_EQ(where("/x/p.json", "/c", "/h"), "/x/p.json");
  EXPECT_EQ(where("", "/c", "/h"), "/c/zeroth/machine.json");
  EXPECT_EQ(where(nullptr, "c", "/h"), "/h/.cache/zeroth/machine.json");
  EXPECT_EQ(where(nullptr, nullptr, nullptr), "");
  EXPECT_THROW(job::MachineProfile().save(), Error);
  ::setenv("HOME", before.c_str(), 1);
}

TEST_F(MachineProfileTest, IsAvailableToPlugins) {
  ::setenv("ZR_MACHINE_PROFILE", file.c_str(), 1);
  Ledger ledger;
  ThreadPool pool(1);
  plugin::PluginHost host(ledger, pool);
  job::offer_machine_profile(host);
  const auto* service = static_cast<const zr_machine_service*>(host.abi()->service(host.abi(), "zr.host.machine/1"));
  ASSERT_TRUE(service);
  uint64_t block_bytes = 1;
  uint32_t depth = 2;
  const std::string path = scratch.folder().string();
  EXPECT_EQ(service->disk(host.abi(), path.c_str(), &block_bytes, &depth), ZR_UNSUPPORTED);
  EXPECT_EQ(service->disk(host.abi(), scratch.path("nowhere").c_str(), &block_bytes, &depth), ZR_UNSUPPORTED);
  EXPECT_EQ(block_bytes, 1u);
  EXPECT_EQ(depth, 2u);
  job::MachineProfile profile;
  job::DiskProfile measured = disk("", 0, 1 << 18);
  measured.file_system = job::file_system_of(path);
  profile.put(measured);
  profile.save();
  EXPECT_EQ(service->disk(host.abi(), path.c_str(), &block_bytes, &depth), ZR_OK);
  EXPECT_EQ(block_bytes, 1u << 18);
  EXPECT_EQ(depth, 16u);
}

}  // namespace
