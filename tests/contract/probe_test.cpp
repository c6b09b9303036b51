// abidiff compares a probe library of the pinned headers with one of the current headers: a library with a function for
// every public struct, built for hosts of version 0.9. Nothing is suppressed. layout_test.cpp compares the constants,
// which abidiff does not see.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <regex>
#include <set>

#include "support/scratch.hpp"
#include "support/shell.hpp"
#include "support/text_of.hpp"

namespace zr::testing {
namespace {

namespace fs = std::filesystem;
const std::string kPinned = ZR_SOURCE_DIR "/sdk/abi/0.9", kCurrent = ZR_SOURCE_DIR "/sdk/include";

// The source of a probe library for the headers in include/zr/abi.
std::string probe_source(const std::string& include, std::set<std::string>* structs) {
  std::string headers, functions;
  const std::regex definition(R"(typedef struct (\w+) \{)");
  for (const auto& entry : fs::directory_iterator(include + "/zr/abi")) {
    if (entry.path().extension() != ".h") continue;
    headers += "#include \"zr/abi/" + entry.path().filename().string() + "\"\n";
    const std::string text = text_of(entry.path());
    for (std::sregex_iterator at(text.begin(), text.end(), definition), end; at != end; ++at) structs->insert((*at)[1]);
  }
  for (const std::string& name : *structs)
    functions += "ZR_EXPORT void probe_" + name + "(const " + name + " *);\nvoid probe_" + name + "(const " + name +
                 " *given) { (void)given; }\n";
  return headers + functions;
}

class ProbeTest : public ::testing::Test {
 protected:
  // Builds the probe library NAME.so.
  std::string probe(const std::string& name, const std::string& include) {
    std::set<std::string> structs;
    const std::string base = scratch_.folder().string() + "/" + name;
    std::ofstream(base + ".c") << probe_source(include, &structs);
    EXPECT_GE(structs.size(), 40u);
    const Outcome built =
        shell("cc -std=c11 -g -shared -fPIC -DZR_TARGET_MINOR=9 -I" + include + " -o " + base + ".so " + base + ".c");
    EXPECT_EQ(built.code, 0) << built.output;
    return base + ".so";
  }
  // The pinned headers with one text replaced, as an include folder.
  std::string changed(const std::string& header, const std::string& from, const std::string& to) {
    const fs::path folder = scratch_.folder() / "changed";
    fs::create_directories(folder / "zr");
    fs::copy(kPinned + "/zr/abi", folder / "zr/abi", fs::copy_options::recursive);
    std::string text = text_of(folder / "zr/abi" / header);
    const std::size_t at = text.find(from);
    EXPECT_NE(at, text.npos) << from;
    std::ofstream(folder / "zr/abi" / header) << text.replace(at, from.size(), to);
    return folder.string();
  }
  Outcome difference(const std::string& include) {
    EXPECT_TRUE(has_program("abidiff")) << "abidiff is not installed; `make setup` installs it (.ci/debian.txt)";
    return shell("abidiff " + probe("pinned", kPinned) + " " + probe("other", include));
  }
  test::Scratch scratch_;
};

TEST_F(ProbeTest, CurrentHeadersAreThePinnedOnes) {
  const Outcome outcome = difference(kCurrent);
  EXPECT_EQ(outcome.code, 0) << outcome.output;
}

TEST_F(ProbeTest, TypeOfAMemberIsADifference) {
  const Outcome outcome = difference(changed("optimizer.h", "double grad_norm;", "int64_t grad_norm;"));
  EXPECT_EQ(outcome.code, 4) << outcome.output;
  EXPECT_NE(outcome.output.find("type of 'double grad_norm' changed"), std::string::npos) << outcome.output;
}

TEST_F(ProbeTest, ArgumentOfAFunctionIsADifference) {
  const Outcome outcome =
      difference(changed("optimizer.h", "uint32_t group, const zr_config", "int32_t group, const zr_config"));
  EXPECT_EQ(outcome.code, 4) << outcome.output;
}

TEST_F(ProbeTest, FunctionInTheMiddleOfATableIsADifference) {
  const Outcome outcome = difference(
      changed("host.h", "  /* [any] Adds a reference. */", "  void (*more)(void);\n  /* [any] Adds a reference. */"));
  EXPECT_EQ(outcome.code, 4) << outcome.output;
}

}  // namespace
}  // namespace zr::testing
