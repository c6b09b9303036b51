#include "doctor/plugins.hpp"

#include <gtest/gtest.h>

#include "unit/core/doctor/text.hpp"

namespace zr::host::doctor {
namespace {

using plugin::RejectionCause;

PluginFile rejected(RejectionCause cause, const std::vector<std::string>& subjects = {}) {
  PluginFile file{{"/p/zr_optimizer_bad.so", false, "it is bad", {}}};
  file.validation.rejection = {cause, subjects};
  return file;
}

// Of a user who owns everything.
std::string remedy(RejectionCause cause, const std::vector<std::string>& subjects = {}) {
  return remedy_of(rejected(cause, subjects), {});
}

TEST(DoctorRemedyTest, ChangesPermissions) {
  EXPECT_EQ(remedy(RejectionCause::writable_by_others, {"/p", "/p/zr_optimizer_bad.so"}),
            "chmod go-w /p /p/zr_optimizer_bad.so");
  EXPECT_EQ(remedy(RejectionCause::unreadable, {"/p/a b.so"}), "chmod a+r '/p/a b.so'");
  PluginFile file = rejected(RejectionCause::writable_by_others, {"/p"});
  file.needs_root = true;
  EXPECT_EQ(remedy_of(file, {}), "sudo chmod go-w /p");
  PluginFacts root;
  root.is_root = true;
  EXPECT_EQ(remedy_of(file, root), "chmod go-w /p");
}

TEST(DoctorRemedyTest, TakesOverAFileOfAnotherUser) {
  PluginFile file = rejected(RejectionCause::foreign_owner, {"/p"});
  file.needs_root = true;
  EXPECT_EQ(remedy_of(file, {}), "sudo chown -h \"$(id -un)\" /p");
}

TEST(DoctorRemedyTest, TakesFilesOutOfTheSearchPath) {
  for (const RejectionCause cause : {RejectionCause::crashed, RejectionCause::timed_out, RejectionCause::not_a_library,
                                     RejectionCause::not_a_plugin, RejectionCause::not_a_file})
    EXPECT_EQ(remedy(cause), "mv /p/zr_optimizer_bad.so /p/zr_optimizer_bad.so.disabled");
  EXPECT_EQ(remedy(RejectionCause::broken_link, {"/p/zr_optimizer_bad.so"}), "rm /p/zr_optimizer_bad.so");
  EXPECT_EQ(remedy(RejectionCause::duplicate, {"/a/x.so", "/b/x.so", "/c/x.so"}),
            "mv /b/x.so /b/x.so.disabled && mv /c/x.so /c/x.so.disabled");
  EXPECT_EQ(remedy(RejectionCause::wrong_name, {"zr_optimizer_good.so"}),
            "mv /p/zr_optimizer_bad.so /p/zr_optimizer_good.so");
}

TEST(DoctorRemedyTest, FindsMissingLibraries) {
  PluginFile file = rejected(RejectionCause::missing_library, {"libnuma.so.1"});
  PluginFacts facts;
  EXPECT_EQ(remedy_of(file, facts), "");
  facts.has_apt = true;
  EXPECT_EQ(remedy_of(file, facts), "sudo apt-get install libnuma1");
  file.library_folder = "/p";
  EXPECT_EQ(remedy_of(file, facts), "export LD_LIBRARY_PATH=/p${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}");
  EXPECT_EQ(remedy_of(rejected(RejectionCause::missing_library, {"libunknown.so"}), facts), "");
}

TEST(DoctorRemedyTest, PermitsCodeOnTheFileSystem) {
  PluginFile file = rejected(RejectionCause::noexec, {"/p/zr_optimizer_bad.so"});
  file.mount = "/p";
  EXPECT_EQ(remedy_of(file, {}), "sudo mount -o remount,exec /p");
}

TEST(DoctorRemedyTest, LeavesBugsAndVersionsToTheMessage) {
  for (const RejectionCause cause :
       {RejectionCause::abi_too_new, RejectionCause::abi_too_old, RejectionCause::other_drafts,
        RejectionCause::unknown_role, RejectionCause::unloadable, RejectionCause::plugin_bug,
        RejectionCause::wrong_role})
    EXPECT_EQ(remedy(cause), "");
}

TEST(DoctorPluginsTest, ReportsFoldersFilesAndMissingRoles) {
  PluginFacts facts;
  facts.variable = "/a:/b";
  facts.folders = {{"/a", false, false}, {"/b", true, false}};
  facts.files = {rejected(RejectionCause::crashed)};
  facts.is_root = true;
  const std::string common =
      "warning plug-ins//a: this folder of the search path does not exist\n  fix: export ZR_PLUGIN_PATH=/b\n"
      "warning plug-ins//b: this folder of the search path cannot be read\n  fix: chmod a+rx /b\n";
  const std::string bad =
      " plug-ins//p/zr_optimizer_bad.so: will not load: it is bad\n"
      "  fix: mv /p/zr_optimizer_bad.so /p/zr_optimizer_bad.so.disabled\n";
  const std::string add = "; add the folder of the installation's plug-ins to ZR_PLUGIN_PATH\n";
  const std::string roles =
      "problem plug-ins/strategy: no strategy plug-in loads (searched: /a, /b); every job needs one" + add +
      "warning plug-ins/communicator: no communicator plug-in loads (searched: /a, /b); jobs are limited to one rank" +
      add + "problem plug-ins/optimizer: no optimizer plug-in loads (searched: /a, /b); every job needs one" + add +
      "warning plug-ins/offload: no offload plug-in loads (searched: /a, /b); states cannot be offloaded" + add;
  EXPECT_EQ(lines_of(plugin_checks(facts, {})), common + "problem" + bad + roles);
  EXPECT_EQ(lines_of(plugin_checks(facts, {.file = "a.toml"})), common + "warning" + bad + roles);
}

TEST(DoctorPluginsTest, ReportsASearchPathThatCannotBeUsed) {
  PluginFacts facts;
  facts.search_problem = "ZR_PLUGIN_PATH: 'x' is a relative path";
  EXPECT_EQ(lines_of(plugin_checks(facts, {})),
            "problem plug-ins/search path: ZR_PLUGIN_PATH: 'x' is a relative path\n  fix: unset ZR_PLUGIN_PATH\n");
}

}  // namespace
}  // namespace zr::host::doctor
