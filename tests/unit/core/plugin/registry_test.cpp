#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <xxhash.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "plugin/plugin.hpp"
#include "support/scratch.hpp"

namespace zr::host {

namespace {
const std::string kFolder = ZR_BUILD_DIR "/tests/plugins/good", kFile = kFolder + "/zr_optimizer_bad.so";

plugin::Registry none() { return plugin::Registry(std::vector<std::filesystem::path>{}); }

std::string error_of_load(const plugin::Registry& registry, const std::string& id,
                          plugin::Role role = plugin::Role::optimizer) {
  try {
    registry.load(role, id, "job.toml:1:13");
  } catch (const Error& failure) {
    return failure.what();
  }
  return "no error";
}
}  // namespace

TEST(RegistryTest, LoadsAPluginByItsId) {
  const plugin::Component bad = plugin::Registry({kFolder}).load(plugin::Role::optimizer, "bad", "here");
  EXPECT_STREQ(bad.table->id, "bad");
  EXPECT_STREQ(bad.module->vendor, "tests");
  EXPECT_EQ(bad.file, kFile);
  EXPECT_EQ(role_of(bad), "optimizer");
}

TEST(RegistryTest, LoadsAPluginOfAnyFileNameByItsAbsolutePath) {
  const test::Scratch scratch;
  const std::string copy = scratch.copy(kFile, "mine.so");
  EXPECT_STREQ(none().load(plugin::Role::optimizer, copy, "here").table->id, "bad");
}

TEST(RegistryTest, LoadsAStrippedPlugin) {
  const test::Scratch scratch;
  const std::string copy = scratch.copy(kFile);
  ASSERT_EQ(std::system(("strip --strip-all " + copy).c_str()), 0);
  EXPECT_STREQ(plugin::Registry({scratch.folder()}).load(plugin::Role::optimizer, "bad", "here").table->id, "bad");
}

TEST(RegistryTest, LoadsAFileOnce) {
  const plugin::Registry registry({kFolder});
  EXPECT_EQ(registry.load(plugin::Role::optimizer, "bad", "here").table,
            registry.load(plugin::Role::optimizer, kFile, "here").table);
}

TEST(RegistryTest, HashesTheFileWhenItIsLoaded) {
  const test::Scratch scratch;
  const std::string copy = scratch.copy(kFile);
  std::ostringstream bytes;
  bytes << std::ifstream(copy, std::ios::binary).rdbuf();
  const uint64_t hash = XXH3_64bits(bytes.str().data(), bytes.str().size());
  const plugin::Component loaded = none().load(plugin::Role::optimizer, copy, "here");
  EXPECT_EQ(plugin::loaded_file_hash(loaded), hash);
  std::filesystem::remove(copy);
  EXPECT_EQ(plugin::loaded_file_hash(loaded), hash) << "removed";
  std::ofstream(copy) << "another version";
  EXPECT_EQ(plugin::loaded_file_hash(loaded), hash) << "replaced";
}

TEST(RegistryTest, HasNoHashOfALibraryThatWasNotLoaded) {
  const plugin::Component loaded = plugin::Registry({kFolder}).load(plugin::Role::optimizer, "bad", "here");
  zr_module other = *loaded.module;
  try {
    plugin::loaded_file_hash({loaded.table, &other, "/plugins/other.so"});
    ADD_FAILURE() << "does not throw";
  } catch (const InternalError& failure) {
    EXPECT_STREQ(failure.what(), "/plugins/other.so: this process did not load the library");
  }
}

TEST(RegistryTest, SuggestsTheNearestIdAndListsTheAvailableOnes) {
  EXPECT_EQ(error_of_load(plugin::Registry({kFolder}), "bat"),
            "job.toml:1:13: there is no optimizer plug-in 'bat'; did you mean 'bad'? Available: bad (looked for "
            "zr_optimizer_bat.so in " +
                kFolder + "; ZR_PLUGIN_PATH adds folders)");
  EXPECT_THAT(error_of_load(plugin::Registry({kFolder, "/nowhere"}), "bat"),
              ::testing::HasSubstr("in " + kFolder + ", /nowhere (does not exist); ZR_PLUGIN_PATH"));
  EXPECT_EQ(
      error_of_load(plugin::Registry({kFolder}), "shm", plugin::Role::communicator),
      "job.toml:1:13: there is no communicator plug-in 'shm'; available: none (looked for zr_communicator_shm.so in " +
          kFolder + "; ZR_PLUGIN_PATH adds folders)");
}

TEST(RegistryTest, RejectsARelativePath) {
  EXPECT_EQ(error_of_load(plugin::Registry({kFolder}), "plugins/zr_optimizer_bad.so"),
            "job.toml:1:13: optimizer plug-in 'plugins/zr_optimizer_bad.so': name a plug-in by its id or by an "
            "absolute path");
}

TEST(RegistryTest, RejectsAnAbsolutePathWithoutAFile) {
  EXPECT_EQ(
      error_of_load(none(), "/nowhere/zr.so"),
      "job.toml:1:13: optimizer plug-in '/nowhere/zr.so': there is no such file; correct the path, or name an id");
  EXPECT_EQ(error_of_load(none(), "/usr"), "job.toml:1:13: optimizer plug-in '/usr': it is not a regular file");
}

TEST(RegistryTest, RejectsAFileThatIsNotALibrary) {
  const test::Scratch scratch;
  scratch.write("zr_optimizer_note.so", "a shopping list");
  EXPECT_EQ(error_of_load(plugin::Registry({scratch.folder()}), "note"),
            "job.toml:1:13: optimizer plug-in 'note': " + scratch.path("zr_optimizer_note.so") +
                ": it is not a shared library for this machine; name one built with zr_add_plugin() "
                "(sdk/cmake/ZrPlugin.cmake)");
}

TEST(RegistryTest, RejectsAnIdThatTwoFoldersContain) {
  const test::Scratch one, two;
  const std::string first = one.copy(kFile), second = two.copy(kFile);
  const plugin::Registry registry({one.folder(), two.folder()});
  EXPECT_EQ(error_of_load(registry, "bad"),
            "job.toml:1:13: optimizer plug-in 'bad': several files contain it: " + first + " and " + second +
                "; remove all but one, or name the file by its absolute path");
  EXPECT_STREQ(registry.load(plugin::Role::optimizer, second, "here").table->id, "bad");
  for (const plugin::PluginValidation& each : registry.list()) EXPECT_FALSE(each.accepted);
}

TEST(RegistryTest, TreatsAFolderNamedTwiceAsOne) {
  const plugin::Registry registry({kFolder, kFolder + "/."});
  EXPECT_EQ(registry.directories().size(), 1u);
  EXPECT_EQ(error_of_load(registry, "bad"), "no error");
}

TEST(RegistryTest, RejectsAFileThatOtherUsersCanChange) {
  const test::Scratch scratch;
  const std::string copy = scratch.copy(kFile);
  ::chmod(copy.c_str(), 0646);
  EXPECT_EQ(error_of_load(plugin::Registry({scratch.folder()}), "bad"),
            "job.toml:1:13: optimizer plug-in 'bad': " + copy +
                ": it can be changed by other users, who could run code as you; chmod o-w " + copy);
}

TEST(RegistryTest, RejectsAFolderThatOtherUsersCanChange) {
  const test::Scratch scratch;
  const std::string copy = scratch.copy(kFile);
  ::chmod(scratch.folder().c_str(), 0777);
  const std::string folder = std::filesystem::canonical(scratch.folder()).string();
  EXPECT_EQ(error_of_load(plugin::Registry({scratch.folder()}), "bad"),
            "job.toml:1:13: optimizer plug-in 'bad': " + copy + ": its folder " + folder +
                " can be changed by other users, who could run code as you; chmod o-w " + folder);
}

TEST(RegistryTest, ListsFoundAndRejectedFiles) {
  const test::Scratch scratch;
  scratch.copy(kFile);
  scratch.write("zr_strategy_note.so", "a shopping list");
  scratch.write("other.so", "no candidate");
  const auto all = plugin::Registry({scratch.folder()}).list();
  ASSERT_EQ(all.size(), 2u);
  EXPECT_TRUE(all[0].accepted);
  EXPECT_EQ(all[0].components.size(), 1u);
  EXPECT_FALSE(all[1].accepted);
  EXPECT_EQ(
      all[1].reason,
      "it is not a shared library for this machine; name one built with zr_add_plugin() (sdk/cmake/ZrPlugin.cmake)");
  EXPECT_EQ(plugin::Registry({scratch.folder()}).ids(plugin::Role::strategy), std::vector<std::string>{"note"});
}

// ---- a library of several components: any name zr_<name>.so, and a tag per component ----

const std::string kCollection = ZR_BUILD_DIR "/tests/plugins/collection/zr_optimizer_bad.so";

TEST(RegistryTest, LoadsTheComponentsOfACollectionByTheirIds) {
  const test::Scratch scratch;
  const std::string file = scratch.copy(kCollection, "zr_bundle.so");
  const plugin::Registry registry({scratch.folder()});
  EXPECT_EQ(registry.ids(plugin::Role::optimizer), (std::vector<std::string>{"acme.bad", "bad"}));
  EXPECT_TRUE(registry.exists(plugin::Role::optimizer, "acme.bad"));
  EXPECT_FALSE(registry.exists(plugin::Role::strategy, "acme.bad"));
  for (const char* id : {"bad", "acme.bad"}) {
    const plugin::Component loaded = registry.load(plugin::Role::optimizer, id, "here");
    EXPECT_STREQ(loaded.table->id, id);
    EXPECT_EQ(loaded.file, file);
  }
  const auto all = registry.list();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_TRUE(all[0].accepted) << all[0].reason;
  EXPECT_EQ(all[0].components.size(), 2u);
}

TEST(RegistryTest, RejectsThePathOfACollectionWithSeveralComponentsOfTheRole) {
  EXPECT_EQ(
      error_of_load(none(), kCollection),
      "job.toml:1:13: optimizer plug-in '" + kCollection +
          "': it contains several plug-ins of this role; name one by its id, and add the folder to ZR_PLUGIN_PATH");
}

TEST(RegistryTest, RejectsAnIdThatACollectionAndAnotherFileContain) {
  const test::Scratch scratch;
  const std::string bundle = scratch.copy(kCollection, "zr_bundle.so"), single = scratch.copy(kFile);
  const plugin::Registry registry({scratch.folder()});
  EXPECT_THAT(error_of_load(registry, "bad"), ::testing::AllOf(::testing::HasSubstr(single + " and " + bundle),
                                                               ::testing::HasSubstr("remove all but one")));
  EXPECT_EQ(error_of_load(registry, "acme.bad"), "no error");
}

TEST(RegistryTest, SaysThatAFileIsFoundByItsPathOnly) {
  const test::Scratch scratch;
  const auto hint = [&](const std::string& file, const std::string& name) {
    const plugin::PluginValidation validation = plugin::Registry::validate(scratch.copy(file, name));
    EXPECT_TRUE(validation.accepted) << validation.reason;
    return validation.hint;
  };
  EXPECT_EQ(hint(kFile, "zr_optimizer_bad.so"), "");
  EXPECT_EQ(hint(kFile, "zr_optimizer_other.so"),
            "it contains optimizer 'bad', not 'other'; rename the file to zr_optimizer_bad.so");
  EXPECT_EQ(hint(kFile, "zr_strategy_bad.so"), "rename the file to zr_optimizer_bad.so");
  EXPECT_EQ(hint(kFile, "libbad.so"), "rename the file to zr_optimizer_bad.so");
  EXPECT_EQ(hint(kFile, "zr_bundle.so"),
            "it has no tag zr_tag_id_<role>_<id>, so that its components cannot be found; add ZR_ID_TAG, or name it "
            "zr_<role>_<id>.so");
}

TEST(RegistryTest, ListsACollectionWithoutTagsAsRejected) {
  const test::Scratch scratch;
  scratch.copy(kFile, "zr_bundle.so");
  const plugin::Registry registry({scratch.folder()});
  EXPECT_TRUE(registry.ids(plugin::Role::optimizer).empty());
  const auto all = registry.list();
  ASSERT_EQ(all.size(), 1u);
  EXPECT_FALSE(all[0].accepted);
  EXPECT_EQ(all[0].reason,
            "it has no tag zr_tag_id_<role>_<id>, so that its components cannot be found; add ZR_ID_TAG, or name it "
            "zr_<role>_<id>.so");
}

TEST(RegistryTest, NamesTheDebianPackageOfALibrary) {
  EXPECT_EQ(plugin::debian_package_of("libmpi.so.40"), "libopenmpi3");
  EXPECT_EQ(plugin::debian_package_of("libunknown.so"), "");
}

TEST(RegistryTest, ReportsTheCauseOfARejection) {
  using plugin::RejectionCause;
  const std::string folder = ZR_BUILD_DIR "/tests/plugins/";
  for (const auto& [name, cause] : {std::pair{"good", RejectionCause::none},
                                    {"abi_minor", RejectionCause::abi_too_new},
                                    {"abi_major", RejectionCause::abi_too_new},
                                    {"abi_older", RejectionCause::abi_too_old},
                                    {"draft_older", RejectionCause::other_drafts},
                                    {"foreign", RejectionCause::not_a_plugin},
                                    {"unknown_kind", RejectionCause::unknown_role},
                                    {"kind_revision", RejectionCause::unknown_role},
                                    {"kind", RejectionCause::wrong_role},
                                    {"id", RejectionCause::wrong_name},
                                    {"undefined", RejectionCause::unloadable},
                                    {"no_entry", RejectionCause::plugin_bug},
                                    {"null_module", RejectionCause::plugin_bug},
                                    {"api_size", RejectionCause::plugin_bug},
                                    {"id_tag", RejectionCause::plugin_bug},
                                    {"flushes", RejectionCause::plugin_bug}}) {
    const auto all = plugin::Registry({folder + name}).list();
    ASSERT_EQ(all.size(), 1u) << name;
    EXPECT_EQ(all[0].rejection.cause, cause) << name;
    EXPECT_EQ(all[0].accepted, cause == RejectionCause::none) << name;
  }
  const test::Scratch scratch;
  const auto cause_of = [](const std::string& file) { return plugin::Registry::validate(file).rejection; };
  EXPECT_EQ(cause_of("relative.so").cause, RejectionCause::bad_path);
  EXPECT_EQ(cause_of(scratch.path("none.so")).cause, RejectionCause::bad_path);
  EXPECT_EQ(cause_of(scratch.write("text.so", "text")).cause, RejectionCause::not_a_library);
  EXPECT_EQ(cause_of(scratch.folder()).cause, RejectionCause::not_a_file);
  std::filesystem::create_symlink("nothing", scratch.path("link.so"));
  EXPECT_EQ(cause_of(scratch.path("link.so")).cause, RejectionCause::broken_link);
  EXPECT_EQ(cause_of(scratch.path("link.so")).subjects, std::vector{scratch.path("link.so")});
  EXPECT_EQ(plugin::Registry({folder + "id"}).list()[0].rejection.subjects,
            std::vector<std::string>{"zr_optimizer_good.so"});
}

TEST(RegistryTest, NamesAllFilesWithOneIdAsDuplicates) {
  const test::Scratch scratch;
  const std::string copy = scratch.copy(kFile);
  for (const plugin::PluginValidation& one : plugin::Registry({kFolder, scratch.folder()}).list()) {
    EXPECT_EQ(one.rejection.cause, plugin::RejectionCause::duplicate);
    EXPECT_EQ(one.rejection.subjects, (std::vector<std::string>{kFile, copy}));
  }
}

TEST(RegistryTest, ReadsAbsoluteFoldersFromTheEnvironment) {
  ::setenv("ZR_PLUGIN_PATH", ("/nowhere::" + kFolder).c_str(), 1);
  const auto folders = plugin::Registry::standard_directories();
  ASSERT_GE(folders.size(), 3u);
  EXPECT_EQ(folders[0], "/nowhere");
  EXPECT_EQ(folders[1], kFolder);
  EXPECT_EQ(folders[2], std::filesystem::canonical(ZR_BUILD_DIR) / "plugins");
  ::setenv("ZR_PLUGIN_PATH", "plugins", 1);
  try {
    plugin::Registry::standard_directories();
    ADD_FAILURE();
  } catch (const Error& failure) {
    EXPECT_STREQ(failure.what(), "ZR_PLUGIN_PATH: 'plugins' is a relative path; write an absolute one");
  }
  ::unsetenv("ZR_PLUGIN_PATH");
}

}  // namespace zr::host
