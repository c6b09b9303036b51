// Checks the structure of the source tree; core/DESIGN.md describes it.
#include <gtest/gtest.h>

#include "arch/rules.hpp"

namespace zr::arch {
namespace {

const fs::path kRoot = ZR_SOURCE_DIR;
const Found kNothing;

TEST(ArchitectureTest, CoreNamesNoPlugin) { EXPECT_EQ(plugin_names_in_core(kRoot), kNothing); }
TEST(ArchitectureTest, CoreDoesNotTestTheZeroStage) { EXPECT_EQ(stages_in_core(kRoot), kNothing); }
TEST(ArchitectureTest, LibraryDoesNotEndTheProcess) { EXPECT_EQ(process_exits(kRoot), kNothing); }
TEST(ArchitectureTest, NoStaticObjectIsDestroyedBeforeTheEngines) { EXPECT_EQ(destroyed_statics(kRoot), kNothing); }
TEST(ArchitectureTest, OnlyModelApiAndExamplesIncludeLibtorch) {
  EXPECT_EQ(libtorch_outside_its_subsystems(kRoot), kNothing);
}
TEST(ArchitectureTest, PluginsIncludeOnlyTheSdk) { EXPECT_EQ(host_headers_in_plugins(kRoot), kNothing); }
TEST(ArchitectureTest, ConformanceUsesOnlyTheSdk) { EXPECT_EQ(more_than_the_sdk_in_conform(kRoot), kNothing); }
TEST(ArchitectureTest, CoreUsesOneStepOfConformance) { EXPECT_EQ(conform_in_core(kRoot), kNothing); }
TEST(ArchitectureTest, ConfigurationIsReadFromTypedStructs) { EXPECT_EQ(configuration_read_by_path(kRoot), kNothing); }
TEST(ArchitectureTest, CoreNamesNoVendorOfDevices) { EXPECT_EQ(vendors_in_core(kRoot), kNothing); }
TEST(ArchitectureTest, ModelsDoNotUseZeroth) { EXPECT_EQ(zeroth_in_models(kRoot), kNothing); }
TEST(ArchitectureTest, NoFileIsLongerThan600Lines) { EXPECT_EQ(long_files(kRoot), kNothing); }
TEST(ArchitectureTest, NoLineIsWiderThan120Columns) { EXPECT_EQ(wide_lines(kRoot), kNothing); }
TEST(ArchitectureTest, EverySubsystemAndPluginHasAReadme) { EXPECT_EQ(missing_readmes(kRoot), kNothing); }
TEST(ArchitectureTest, EveryPublicFunctionIsDocumented) { EXPECT_EQ(undocumented_functions(kRoot), kNothing); }
TEST(ArchitectureTest, EveryAbiFunctionPointerHasAThreadTag) { EXPECT_EQ(untagged_slots(kRoot), kNothing); }
TEST(ArchitectureTest, BashParsesEveryScript) { EXPECT_EQ(broken_scripts(kRoot), kNothing); }
TEST(ArchitectureTest, LintChecksTheHeadersOfCore) { EXPECT_EQ(unlinted_headers(kRoot), kNothing); }
TEST(ArchitectureTest, TopLevelHasOnlyExpectedFolders) { EXPECT_EQ(strange_folders(kRoot), kNothing); }

}  // namespace
}  // namespace zr::arch
