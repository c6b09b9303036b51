// The structure of the tree, as rules that fail: DESIGN.md 1 and 2.
#include <gtest/gtest.h>

#include "arch/rules.hpp"

namespace zr::arch {
namespace {

const fs::path kRoot = ZR_SOURCE_DIR;
const Found kNothing;

TEST(Architecture, TheCoreKnowsNoPluginByName) { EXPECT_EQ(plugin_names_in_core(kRoot), kNothing); }
TEST(Architecture, TheCoreDoesNotAskForTheStage) { EXPECT_EQ(stages_in_core(kRoot), kNothing); }
TEST(Architecture, OnlyModelApiAndExamplesIncludeLibtorch) {
  EXPECT_EQ(libtorch_outside_its_subsystems(kRoot), kNothing);
}
TEST(Architecture, PluginsAreWrittenFromTheSdkAlone) { EXPECT_EQ(host_headers_in_plugins(kRoot), kNothing); }
TEST(Architecture, AModelKnowsNothingOfZeroth) { EXPECT_EQ(zeroth_in_models(kRoot), kNothing); }
TEST(Architecture, NoFileIsLongerThan600Lines) { EXPECT_EQ(long_files(kRoot), kNothing); }
TEST(Architecture, NoLineIsWiderThan120Columns) { EXPECT_EQ(wide_lines(kRoot), kNothing); }
TEST(Architecture, EverySubsystemAndPluginHasAReadme) { EXPECT_EQ(missing_readmes(kRoot), kNothing); }
TEST(Architecture, EveryPublicFunctionIsDocumented) { EXPECT_EQ(undocumented_functions(kRoot), kNothing); }
TEST(Architecture, EverySlotOfTheAbiHasItsThreadTag) { EXPECT_EQ(untagged_slots(kRoot), kNothing); }
TEST(Architecture, AHeaderOfTheAbiIsOneScreen) { EXPECT_EQ(long_abi_headers(kRoot), kNothing); }
TEST(Architecture, EveryScriptOfTheShellParses) { EXPECT_EQ(broken_scripts(kRoot), kNothing); }
TEST(Architecture, TheTopLevelIsFixed) { EXPECT_EQ(strange_folders(kRoot), kNothing); }

}  // namespace
}  // namespace zr::arch
