#include "doctor/libraries.hpp"

#include <gtest/gtest.h>

#include "support/scratch.hpp"
#include "unit/core/doctor/text.hpp"

namespace zr::host::doctor {
namespace {

LibraryFacts complete() {
  return {"/opt/lib", "/opt/lib/libzeroth.so.0", {}, "/torch/lib/libtorch_cpu.so", "2.11.0", "2.11.0", ""};
}

TEST(DoctorLibrariesTest, ReportsTheLibtorchThatTheLoaderFinds) {
  EXPECT_EQ(lines_of(library_checks(complete())),
            "ok libraries/libzeroth: /opt/lib/libzeroth.so.0\n"
            "ok libraries/libtorch: 2.11.0: /torch/lib/libtorch_cpu.so\n");
}

TEST(DoctorLibrariesTest, WarnsAboutAnInstallationWithoutLibzeroth) {
  EXPECT_EQ(
      lines_of(library_checks({"/opt/lib"})),
      "warning libraries/libzeroth: /opt/lib has no libzeroth.so, so programs cannot be linked or run; install the "
      "component \"engine\" of a build with libtorch\n");
}

TEST(DoctorLibrariesTest, ReportsAMissingLibtorch) {
  LibraryFacts facts = complete();
  facts.missing = {"libtorch_cpu.so", "libc10.so"};
  facts.libtorch = "";
  EXPECT_EQ(lines_of(library_checks(facts)),
            "ok libraries/libzeroth: /opt/lib/libzeroth.so.0\n"
            "warning libraries/libtorch: no libtorch 2.11 beside libzeroth.so; programs that link libtorch find it by "
            "themselves, and `zeroth doctor FILE.toml` checks the program of a job; other programs need it as "
            "/opt/lib/libtorch\n  fix: ln -sfn /path/to/libtorch /opt/lib/libtorch\n");
  facts.torch_root = "/my torch";
  EXPECT_EQ(lines_of({library_checks(facts).back()}),
            "warning libraries/libtorch: no libtorch 2.11 beside libzeroth.so; programs that link libtorch find it by "
            "themselves, and `zeroth doctor FILE.toml` checks the program of a job; other programs need it as "
            "/opt/lib/libtorch; at run time, TORCH_ROOT has no effect\n  fix: ln -sfn '/my torch' /opt/lib/libtorch\n");
}

TEST(DoctorLibrariesTest, ReportsAnotherVersionOfLibtorch) {
  LibraryFacts facts = complete();
  facts.version = "2.9.1";
  EXPECT_EQ(
      lines_of({library_checks(facts).back()}),
      "problem libraries/libtorch: 2.9.1: /torch/lib/libtorch_cpu.so; libzeroth.so was built with libtorch 2.11, and "
      "other versions are not binary compatible\n  fix: ln -sfn /path/to/libtorch /opt/lib/libtorch\n");
  facts.version = "2.11.3";
  EXPECT_EQ(library_checks(facts).back().verdict, Verdict::ok);
  facts.version = "";
  EXPECT_EQ(library_checks(facts).back().verdict, Verdict::ok);
}

TEST(DoctorLibrariesTest, IsContentIfTheProgramFindsALibtorchOfItsOwn) {
  LibraryFacts facts = complete();
  facts.libtorch = facts.version = "";
  facts.missing = {"libtorch_cpu.so"};
  facts.program_has_all = true;
  EXPECT_EQ(lines_of({library_checks(facts).back()}),
            "ok libraries/libtorch: no libtorch 2.11 beside libzeroth.so; the program of the file finds one of its "
            "own\n");
}

TEST(DoctorLibrariesTest, ReportsOtherMissingLibraries) {
  LibraryFacts facts = complete();
  facts.missing = {"libgomp.so.1"};
  EXPECT_EQ(
      lines_of({library_checks(facts).front()}),
      "problem libraries/libzeroth: /opt/lib/libzeroth.so.0: shared libraries were not found: libgomp.so.1; install "
      "them, or add their folder to LD_LIBRARY_PATH\n");
}

TEST(DoctorLibrariesTest, ReadsTheVersionOfArchivesAndWheels) {
  const test::Scratch scratch;
  const std::string library = scratch.write("lib/libtorch_cpu.so", "");
  EXPECT_EQ(torch_version_of(library), "");
  scratch.write("version.py", "from typing import Optional\n\n__version__ = '2.11.0+cu130'\ncuda = '13.0'\n");
  EXPECT_EQ(torch_version_of(library), "2.11.0");
  scratch.write("build-version", "2.12.1+cpu\n");
  EXPECT_EQ(torch_version_of(library), "2.12.1");
}

}  // namespace
}  // namespace zr::host::doctor
