// The exact output of the `zeroth` command line (cli.txt). Runs the built program in build/tests/job.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <regex>
#include <sstream>

#include "support/golden_cases.hpp"
#include "support/sanitizers.hpp"
#include "support/scratch.hpp"

namespace {

const std::string kJob = ZR_BUILD_DIR "/tests/job";

std::string read(const std::string& file) {
  std::ostringstream text;
  text << std::ifstream(file).rdbuf();
  std::string all = text.str();
  while (!all.empty() && all.back() == '\n') all.pop_back();
  for (const auto& [path, name] :
       {std::pair<std::string, std::string>{kJob, "{job}"}, {ZR_BUILD_DIR "/bin", "{bin}"}, {ZR_BUILD_DIR, "{build}"}})
    for (auto at = all.find(path); at != all.npos; at = all.find(path)) all.replace(at, path.size(), name);
  return std::regex_replace(all, std::regex("\\(pid [0-9]+\\)"), "(pid ...)");
}

// Without what a command says about a wait of more than 2 s, which a busy machine may cause, unless the case is about
// one.
std::string without_waits(const std::string& err, const std::string& expected) {
  if (expected.find("zeroth: waiting for ") != expected.npos) return err;
  return std::regex_replace(err, std::regex("zeroth: waiting for [^\n]*\n?"), "");
}

// Lines of several ranks come in any order.
std::string sorted(const std::string& text) {
  auto lines = zr::golden::lines_of(text);
  std::sort(lines.begin(), lines.end());
  std::string all;
  for (const auto& line : lines) all += (all.empty() ? "" : "\n") + line;
  return all;
}

struct Outcome {
  int code;
  std::string out, err;
};
Outcome run(const std::string& command) {
  const zr::test::Scratch scratch;
  const int status = std::system(("cd " + kJob + " && export ZR_PLUGIN_PATH=" + kJob + "/plugins && { " + command +
                                  "\n} >" + scratch.path("out") + " 2>" + scratch.path("err") + " </dev/null")
                                     .c_str());
  return {WEXITSTATUS(status), read(scratch.path("out")), read(scratch.path("err"))};
}

}  // namespace

TEST(CommandLineTest, PrintsTheTextsOfTheGoldenFile) {
  zr::golden::check(ZR_SOURCE_DIR "/tests/golden/cli.txt", 80, [](const zr::golden::Case& one) {
    const Outcome got = run(one["run"]);
    return std::vector<zr::golden::ProducedPart>{{"exit", got.code == 0 ? "" : std::to_string(got.code)},
                                                 {"out", got.out, sorted},
                                                 {"err", without_waits(got.err, one["err"])}};
  });
}

// Untrusted files, programs and plug-ins: cli_untrusted.txt. Each case sets its own limits. A case whose part "needs"
// has "root" changes its user or its mounts; one that needs "no sanitizer" limits the address space or removes /proc.
TEST(CommandLineTest, RejectsHostileInputWithGoldenMessages) {
  int skipped = 0;
  zr::golden::check(ZR_SOURCE_DIR "/tests/golden/cli_untrusted.txt", 30, [&](const zr::golden::Case& one) {
    const auto needs = [&](const char* what) { return one["needs"].find(what) != std::string::npos; };
    if ((needs("root") && ::geteuid() != 0) || (needs("no sanitizer") && zr::test::kSanitized)) {
      ++skipped;
      return std::vector<zr::golden::ProducedPart>{};
    }
    const Outcome got = run(one["run"]);
    return std::vector<zr::golden::ProducedPart>{{"exit", got.code == 0 ? "" : std::to_string(got.code)},
                                                 {"out", got.out, sorted},
                                                 {"err", without_waits(got.err, one["err"])}};
  });
  if (skipped) GTEST_SKIP() << skipped << " cases need root, or a build without sanitizers";
}

TEST(CommandLineTest, ListsPluginsAndRejectedFiles) {
  const zr::test::Scratch more;
  more.write("zr_offload_note.so", "a shopping list");
  const Outcome got =
      run("ZR_PLUGIN_PATH=" + kJob + "/plugins:" + more.folder().string() + ":/nowhere ../../bin/zeroth plugins");
  EXPECT_EQ(got.code, 0);
  EXPECT_EQ(got.err, "");
  EXPECT_EQ(
      got.out.find("looked in {job}/plugins " + more.folder().string() + " /nowhere (does not exist) {build}/plugins"),
      0u);
  for (const char* part : {"strategy 'flat' 2.1  (zr.strategy/1, ABI built 0.9, needs 0.9; tests, C11)\n  "
                           "{job}/plugins/zr_strategy_flat.so\n"
                           "  one shard per rank, MIT, https://example.org/shards\n"
                           "    bucket_bytes  size  \"16MiB\"  4.00 KiB to 1.00 GiB  gradients that leave together\n",
                           "optimizer 'adam' 2.2  (", "communicator 'wire' 2.3  ("})
    EXPECT_NE(got.out.find(part), got.out.npos) << part << "in\n" << got.out;
  EXPECT_NE(got.out.find("rejected: " + more.path("zr_offload_note.so") +
                         "\n    it is not a shared library for this machine; name one built with "
                         "zr_add_plugin() (sdk/cmake/ZrPlugin.cmake)"),
            got.out.npos);
}

TEST(CommandLineTest, ListsTheDevicesOfPlugins) {
  const zr::test::Scratch scratch;
  const std::string folder = scratch.folder().string(), gpu = folder + "/gpu/", only = gpu + "zr_optimizer_lion.so",
                    also = gpu + "zr_optimizer_adamw.so", note = gpu + "zr_optimizer_note.so";
  const Outcome made =
      run("umask 022 && mkdir " + gpu + " " + folder + "/empty && cp " ZR_BUILD_DIR "/plugins/zr_optimizer_adamw.so " +
          also + " && echo a note >" + note +
          " && g++ -std=c++17 -shared -fPIC -I" ZR_SOURCE_DIR "/sdk/include " ZR_SOURCE_DIR
          "/examples/plugins/lion/lion.cpp -o " +
          only);
  ASSERT_EQ(made.code, 0) << made.err;
  const Outcome got = run("ZR_PLUGIN_PATH=" + folder + " ../../bin/zeroth plugins");
  EXPECT_EQ(got.code, 0);
  EXPECT_EQ(got.err, "");
  const auto row_of = [&](const std::string& name) {  // without its keys
    const auto from = got.out.find("\n" + name);
    EXPECT_NE(from, got.out.npos) << name << " in\n" << got.out;
    return from == got.out.npos ? "" : got.out.substr(from, got.out.find("\n    ", from) - from);
  };
  EXPECT_NE(row_of("optimizer 'lion' ").find("\n  only for job.device = \"gpu\": " + only), std::string::npos)
      << got.out;
  EXPECT_NE(row_of("optimizer 'adamw' ").find("\n  also for job.device = \"gpu\": " + also), std::string::npos)
      << got.out;
  EXPECT_EQ(got.out.find("optimizer 'adamw' "), got.out.rfind("optimizer 'adamw' ")) << got.out;
  EXPECT_EQ(row_of("optimizer 'lamb' ").find("job.device"), std::string::npos) << got.out;
  EXPECT_NE(got.out.find("\n  " + only + ": warning: it exports "), got.out.npos) << got.out;
  EXPECT_NE(got.out.find("\nrejected: " + note + "\n"), got.out.npos) << got.out;
  EXPECT_EQ(got.out.find("\"empty\""), got.out.npos) << got.out;
}

TEST(CommandLineTest, WarnsAboutAPluginOfPlainFlags) {
  const zr::test::Scratch scratch;
  const std::string file = scratch.path("zr_optimizer_lion.so");
  const Outcome built = run("umask 022 && g++ -std=c++17 -shared -fPIC -I" ZR_SOURCE_DIR "/sdk/include " ZR_SOURCE_DIR
                            "/examples/plugins/lion/lion.cpp -o " +
                            file);
  ASSERT_EQ(built.code, 0) << built.err;
  for (const std::string& command : {"../../bin/zeroth plugins " + file,
                                     "ZR_PLUGIN_PATH=" + scratch.folder().string() + " ../../bin/zeroth plugins"}) {
    const Outcome got = run(command);
    EXPECT_EQ(got.code, 0);
    EXPECT_EQ(got.err, "");
    EXPECT_NE(got.out.find("\n  warning: it exports "), got.out.npos) << got.out;
    EXPECT_EQ(got.out.find("warning"), got.out.rfind("warning")) << got.out;
  }
}
