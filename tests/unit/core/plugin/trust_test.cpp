// Checks of owners, modes and links of a plug-in's file and of all its parent folders. Messages:
// tests/golden/plugin_trust.txt.
#include "plugin/trust.hpp"

#include <grp.h>
#include <gtest/gtest.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <functional>
#include <map>

#include "base/error.hpp"
#include "plugin/plugin.hpp"
#include "support/golden_cases.hpp"
#include "support/scratch.hpp"

namespace zr::host {

namespace {
namespace fs = std::filesystem;
constexpr uid_t kOther = 65534;
const std::string kTrusted = ZR_BUILD_DIR "/tests/plugins/good/zr_optimizer_bad.so";

bool is_root() { return ::geteuid() == 0; }

// A folder "safe" with a plug-in, and "outer/inner" with another.
struct Folders {
  test::Scratch scratch;
  std::string root = fs::canonical(scratch.folder()).string();
  std::string file = scratch.copy(kTrusted, "safe/zr_optimizer_bad.so");
  std::string inner = scratch.copy(kTrusted, "outer/inner/zr_optimizer_bad.so");
  std::string named = file;  // the path to check

  std::string path(const std::string& name) const { return root + "/" + name; }
  void own(const std::string& name, uid_t user, gid_t group = static_cast<gid_t>(-1)) const {
    ASSERT_EQ(::lchown(path(name).c_str(), user, group), 0) << name;
  }
  void mode(const std::string& name, mode_t bits) const { ASSERT_EQ(::chmod(path(name).c_str(), bits), 0) << name; }
  void link(const std::string& target, const std::string& name) {
    ASSERT_EQ(::symlink(target.c_str(), path(name).c_str()), 0) << name;
    named = path(name);
  }
  std::string problem() const {
    plugin::TrustedFile found;
    std::string text = trust_problem(named, found);
    for (auto at = text.find(root); at != text.npos; at = text.find(root)) text.replace(at, root.size(), "{folder}");
    return text;
  }
};

struct Case {
  bool needs_root;
  std::function<void(Folders&)> prepare;
};
const std::map<std::string, Case>& cases() {
  static const std::map<std::string, Case> all{
      {"the file is another user's", {true, [](Folders& f) { f.own("safe/zr_optimizer_bad.so", kOther); }}},
      {"the folder is another user's", {true, [](Folders& f) { f.own("safe", kOther); }}},
      {"a folder above is another user's",
       {true,
        [](Folders& f) {
          f.own("outer", kOther);
          f.named = f.inner;
        }}},
      {"a link of another user in a sticky folder",
       {true,
        [](Folders& f) {
          fs::create_directory(f.path("shared"));
          f.mode("shared", 01777);
          f.link(f.file, "shared/zr_optimizer_bad.so");
          f.own("shared/zr_optimizer_bad.so", kOther);
        }}},
      {"a link to a folder of another user",
       {true,
        [](Folders& f) {
          f.own("outer/inner", kOther);
          f.link("outer/inner", "here");
          f.named = f.path("here/zr_optimizer_bad.so");
        }}},
      {"the file can be written by the world", {false, [](Folders& f) { f.mode("safe/zr_optimizer_bad.so", 0666); }}},
      {"the folder can be written by the world", {false, [](Folders& f) { f.mode("safe", 0777); }}},
      {"a folder above can be written by the world",
       {false,
        [](Folders& f) {
          f.mode("outer", 0777);
          f.named = f.inner;
        }}},
      {"the file can be written by a group of several",
       {true,
        [](Folders& f) {
          f.own("safe/zr_optimizer_bad.so", 0, 1);
          f.mode("safe/zr_optimizer_bad.so", 0664);
        }}},
      {"a link that leads nowhere", {false, [](Folders& f) { f.link("nothing.so", "safe/link.so"); }}},
      {"a link that leads to itself", {false, [](Folders& f) { f.link("loop.so", "safe/loop.so"); }}},
      {"a folder instead of a file", {false, [](Folders& f) { f.named = f.path("safe"); }}},
  };
  return all;
}
}  // namespace

TEST(PluginTrustTest, RejectsUntrustedFilesWithTheMessagesOfTheGoldenFile) {
  int skipped = 0;
  golden::check(ZR_SOURCE_DIR "/tests/golden/plugin_trust.txt", cases().size(), [&](const golden::Case& one) {
    const auto at = cases().find(one.title);
    EXPECT_NE(at, cases().end()) << one.title;
    if (at == cases().end() || (at->second.needs_root && !is_root())) {
      ++skipped;
      return std::vector<golden::ProducedPart>{};
    }
    Folders folders;
    at->second.prepare(folders);
    return std::vector<golden::ProducedPart>{{"says", folders.problem()}};
  });
  if (skipped) GTEST_SKIP() << skipped << " cases need root, which can give files to another user";
}

TEST(PluginTrustTest, ReportsAllComponentsThatOtherUsersCanWrite) {
  Folders folders;
  folders.mode("safe", 0757);
  folders.mode("outer", 0757);
  folders.mode("outer/inner/zr_optimizer_bad.so", 0646);
  folders.link("../outer/inner/zr_optimizer_bad.so", "safe/link.so");
  plugin::TrustedFile found;
  plugin::Rejection rejection;
  EXPECT_NE(trust_problem(folders.named, found, &rejection), "");
  EXPECT_EQ(rejection.cause, plugin::RejectionCause::writable_by_others);
  EXPECT_EQ(rejection.subjects, (std::vector<std::string>{folders.path("safe"), folders.path("outer"),
                                                          folders.path("outer/inner/zr_optimizer_bad.so")}));
}

TEST(PluginTrustTest, AcceptsAStickyParentFolderAndTheUsersOwnLinks) {
  Folders folders;
  folders.mode("outer", 01777);
  folders.link("../outer/inner/../inner/zr_optimizer_bad.so", "safe/link.so");
  EXPECT_EQ(folders.problem(), "");
  plugin::TrustedFile found;
  EXPECT_EQ(trust_problem(folders.named, found), "");
  EXPECT_EQ(found.path, folders.path("outer/inner/zr_optimizer_bad.so"));
  EXPECT_TRUE(is_unchanged(found));
  fs::copy_file(kTrusted, folders.path("other.so"));
  fs::rename(folders.path("other.so"), found.path);
  EXPECT_FALSE(is_unchanged(found));
}

TEST(PluginTrustTest, AcceptsGroupWritableFilesOfAPrivateGroup) {
  const passwd* user = ::getpwuid(::geteuid());
  const group* own = ::getgrgid(::getegid());
  if (!user || !own || std::string(user->pw_name) != own->gr_name) GTEST_SKIP() << "this user has no private group";
  Folders folders;
  folders.mode("safe", 0775);
  folders.mode("safe/zr_optimizer_bad.so", 0775);
  EXPECT_EQ(folders.problem(), "");
}

TEST(PluginTrustTest, IsCheckedBeforeAPluginIsLoaded) {
  Folders folders;
  folders.mode("outer", 0777);
  const plugin::PluginValidation validation = plugin::Registry::validate(folders.inner);
  EXPECT_FALSE(validation.accepted);
  EXPECT_NE(validation.reason.find("outer can be changed by other users"), std::string::npos) << validation.reason;
}

TEST(PluginTrustTest, NamesADanglingLinkAndAnUnreadableFile) {
  Folders folders;
  folders.link("nothing.so", "safe/zr_optimizer_gone.so");
  try {
    plugin::Registry({folders.path("safe")}).load(plugin::Role::optimizer, "gone", "job.toml:1:13");
    ADD_FAILURE();
  } catch (const Error& failure) {
    EXPECT_EQ(failure.what(), "job.toml:1:13: optimizer plug-in 'gone': " + folders.named + ": it is a link to " +
                                  folders.path("safe/nothing.so") +
                                  ", which cannot be opened: No such file or directory; correct or remove the link");
  }
  if (is_root()) GTEST_SKIP() << "root reads every file";
  folders.mode("safe/zr_optimizer_bad.so", 0);
  EXPECT_EQ(plugin::Registry::validate(folders.file).reason,
            "it cannot be read: Permission denied: chmod +r " + folders.path("safe/zr_optimizer_bad.so"));
}

}  // namespace zr::host
