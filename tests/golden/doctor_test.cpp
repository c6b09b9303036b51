// `zeroth doctor` on this machine, with real plug-ins, good and broken ones. What it says about the machine differs
// between machines: tests/unit/core/doctor tests those texts.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using zr::test::Scratch;
using zr::testing::shell;

const std::string kZeroth = ZR_BUILD_DIR "/bin/zeroth";

struct Diagnosis {
  int code;
  json report;
  // Checks of a topic whose name contains `name`.
  std::vector<json> checks(const std::string& topic, const std::string& name) const {
    std::vector<json> found;
    for (const json& check : report["checks"])
      if (check["topic"] == topic && check["name"].get<std::string>().find(name) != std::string::npos)
        found.push_back(check);
    return found;
  }
  std::ptrdiff_t problems(const std::string& topic = "") const {
    return std::count_if(report["checks"].begin(), report["checks"].end(), [&](const json& check) {
      return check["verdict"] == "problem" && (topic.empty() || check["topic"] == topic);
    });
  }
};

// Runs `zeroth doctor ARGUMENTS --json -` in `folder`; `before` is shell code that prepares the environment.
Diagnosis diagnose(const Scratch& folder, const std::string& before, const std::string& arguments = "") {
  const auto run = shell("cd '" + folder.folder().string() + "' && unset ZR_PLUGIN_PATH; " + before + "\n" + kZeroth +
                         " doctor " + arguments + " --json - 2>/dev/null");
  Diagnosis diagnosis{run.code, json::parse(run.output, nullptr, false)};
  EXPECT_TRUE(diagnosis.report.is_object()) << run.output;
  return diagnosis;
}

std::string search(const fs::path& folder) { return "export ZR_PLUGIN_PATH='" + folder.string() + "'"; }

std::string filled(std::string text, const std::string& folder) {
  for (auto at = text.find("{folder}"); at != text.npos; at = text.find("{folder}")) text.replace(at, 8, folder);
  return text;
}

// The only check of a rejected file.
json check_of(const Diagnosis& diagnosis, const std::string& file) {
  const auto checks = diagnosis.checks("plug-ins", file);
  EXPECT_EQ(checks.size(), 1u) << file;
  return checks.empty() ? json{{"verdict", ""}, {"message", ""}, {"command", ""}} : checks[0];
}

TEST(ZerothDoctor, NamesEveryShippedPluginAsLoading) {
  const Scratch scratch;
  const Diagnosis diagnosis = diagnose(scratch, "");
  int files = 0;
  for (const auto& entry : fs::directory_iterator(ZR_BUILD_DIR "/plugins")) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with("zr_") || entry.path().extension() != ".so") continue;
    ++files;
    const auto id = name.find('_', 3);
    const std::string role = name.substr(3, id - 3), quoted_id = name.substr(id + 1, name.size() - id - 4);
    const auto checks = diagnosis.checks("plug-ins", role + " '" + quoted_id + "'");
    ASSERT_EQ(checks.size(), 1u) << name;
    EXPECT_EQ(checks[0]["verdict"], "ok") << checks[0];
    EXPECT_EQ(checks[0]["message"].get<std::string>().substr(0, 15), "loads; version ");
    EXPECT_EQ(checks[0]["command"], "");
  }
  EXPECT_GT(files, 10);
  EXPECT_EQ(diagnosis.problems("plug-ins"), 0);
}

TEST(ZerothDoctor, HasAnExitCodeAndCountsThatFollowFromItsChecks) {
  const Scratch scratch;
  const Diagnosis diagnosis = diagnose(scratch, "");
  EXPECT_EQ(diagnosis.report["zeroth"], "0.1.0");
  EXPECT_EQ(diagnosis.report["abi"], "0.9");
  EXPECT_EQ(diagnosis.report["problems"], diagnosis.problems());
  EXPECT_EQ(diagnosis.code, diagnosis.problems() ? 3 : 0);
  EXPECT_EQ(diagnosis.report["warnings"],
            std::count_if(diagnosis.report["checks"].begin(), diagnosis.report["checks"].end(),
                          [](const json& check) { return check["verdict"] == "warning"; }));
  for (const char* topic : {"plug-ins", "libraries", "cores", "memory", "devices", "limits", "disk"})
    EXPECT_FALSE(diagnosis.checks(topic, "").empty()) << topic;
  for (const json& check : diagnosis.report["checks"]) {
    EXPECT_NE(check["message"], "") << check;
    if (check["verdict"] == "ok") {
      EXPECT_EQ(check["command"], "") << check;
    }
  }
  EXPECT_TRUE(fs::is_empty(scratch.folder())) << "it leaves files in the current folder";
}

// A broken plug-in, and what doctor says about it. {folder} is the folder of the plug-in.
struct Broken {
  const char *name, *prepare, *reason, *command;
  const char* repaired;  // the name of a check that the command makes appear; "" if the file is only out of the way
};
constexpr const char *kBad = "cp '" ZR_BUILD_DIR "/tests/plugins/",
                     *kDisable = "mv {folder}/zr_optimizer_bad.so {folder}/zr_optimizer_bad.so.disabled";

TEST(ZerothDoctor, PrintsACommandThatFixesABrokenPlugin) {
  const std::string copy = "/zr_optimizer_bad.so' {folder}";
  const std::vector<Broken> all{
      {"aborts", "", "its code crashed with signal 6 (SIGABRT)", kDisable, ""},
      {"faults", "", "its code crashed with signal 11 (SIGSEGV)", kDisable, ""},
      {"exits", "", "its code ended the process with exit code 0", kDisable, ""},
      {"sleeps", "", "it did not finish loading within 0.4 seconds", kDisable, ""},
      {"foreign", "", "it is not a Zeroth plug-in (no ABI tag)", kDisable, ""},
      {"good", "echo text > {folder}/zr_optimizer_bad.so", "it is not a shared library for this machine", kDisable, ""},
      {"good", "rm {folder}/*.so; mkdir {folder}/zr_optimizer_bad.so", "it is not a regular file", kDisable, ""},
      {"good", "rm {folder}/*.so; ln -s nothing {folder}/zr_optimizer_bad.so", "which cannot be opened",
       "rm {folder}/zr_optimizer_bad.so", ""},
      {"good", "chmod o+w {folder}/*.so", "it can be changed by other users", "chmod go-w {folder}/zr_optimizer_bad.so",
       "optimizer 'bad'"},
      {"good", "chmod o+w {folder} {folder}/*.so", "its folder {folder} can be changed by other users",
       "chmod go-w {folder} {folder}/zr_optimizer_bad.so", "optimizer 'bad'"},
      {"id", "", "it contains optimizer 'good', not 'bad'",
       "mv {folder}/zr_optimizer_bad.so {folder}/zr_optimizer_good.so", "optimizer 'good'"},
  };
  for (const Broken& broken : all) {
    SCOPED_TRACE(std::string(broken.name) + ": " + broken.reason);
    const Scratch plugins, work;
    const std::string folder = plugins.folder().string();
    ASSERT_EQ(shell(filled(kBad + std::string(broken.name) + copy + " && { " +
                               (*broken.prepare ? broken.prepare : "true") + "; }",
                           folder))
                  .code,
              0);
    const std::string environment = search(folder) + " ZR_PLUGIN_LOAD_SECONDS=0.4";
    const Diagnosis before = diagnose(work, environment);
    EXPECT_EQ(before.code, 3);
    const json check = check_of(before, folder + "/zr_optimizer_bad.so");
    EXPECT_EQ(check["verdict"], "problem");
    const std::string message = check["message"], command = check["command"];
    EXPECT_EQ(message.find("will not load: "), 0u) << message;
    EXPECT_NE(message.find(filled(broken.reason, folder)), message.npos) << message;
    EXPECT_EQ(command, filled(broken.command, folder));
    if (testing::Test::HasFailure()) continue;

    ASSERT_EQ(shell(command).output, "");
    const Diagnosis after = diagnose(work, search(folder));
    EXPECT_TRUE(after.checks("plug-ins", folder).empty());
    EXPECT_EQ(after.problems("plug-ins"), 0);
    if (*broken.repaired) {
      EXPECT_EQ(after.checks("plug-ins", broken.repaired).size(), 1u);
    }
  }
}

TEST(ZerothDoctor, HasNoCommandForWhatAnAuthorMustChange) {
  for (const auto& [name, reason] :
       {std::pair{"abi_minor", "it needs plug-in ABI 0.99, this zeroth has 0.9: install a "},
        {"abi_older", "it needs plug-in ABI 0.3, this zeroth has 0.9: install a plug-in "},
        {"draft_older", "it uses draft headers of plug-in ABI 0.8"},
        {"kind_revision", "it contains only a zr.optimizer/2"},
        {"undefined", "undefined symbol: nobody_defines_this"},
        {"no_entry", "it does not export zr_module_v1"},
        {"api_size", "this is a bug in the plug-in"}}) {
    const std::string folder = ZR_BUILD_DIR "/tests/plugins/" + std::string(name);
    const Diagnosis diagnosis = diagnose(Scratch(), search(folder));
    EXPECT_EQ(diagnosis.code, 3);
    const json check = check_of(diagnosis, folder);
    EXPECT_NE(check["message"].get<std::string>().find(reason), std::string::npos) << check;
    EXPECT_EQ(check["command"], "");
  }
}

TEST(ZerothDoctor, KeepsTheFirstOfTwoFilesWithOneId) {
  const Scratch first, second, work;
  const std::string one = first.copy(ZR_BUILD_DIR "/tests/plugins/good/zr_optimizer_bad.so"),
                    two = second.copy(ZR_BUILD_DIR "/tests/plugins/good/zr_optimizer_bad.so");
  const std::string folders = first.folder().string() + ":" + second.folder().string();
  const Diagnosis before = diagnose(work, search(folders));
  EXPECT_EQ(check_of(before, one)["command"], "mv " + two + " " + two + ".disabled");
  EXPECT_EQ(check_of(before, two)["command"], "mv " + two + " " + two + ".disabled");
  ASSERT_EQ(shell(check_of(before, two)["command"].get<std::string>()).code, 0);
  EXPECT_EQ(diagnose(work, search(folders)).checks("plug-ins", "optimizer 'bad'").size(), 1u);
}

TEST(ZerothDoctor, FindsAMissingLibraryBesideThePlugin) {
  const Scratch scratch, work;
  const std::string folder = scratch.folder().string(), file = scratch.path("zr_optimizer_lion.so");
  scratch.write("gone.c", "int zr_test_gone(void) { return 1; }\n");
  const auto built =
      shell("cd '" + folder + "' && umask 022 && cc -shared -fPIC gone.c -o libzrtestgone.so && g++ " +
            "-std=c++17 -shared -fPIC -I" ZR_SOURCE_DIR "/sdk/include " ZR_SOURCE_DIR
            "/examples/plugins/lion/lion.cpp -o zr_optimizer_lion.so -Wl,--no-as-needed -L. -lzrtestgone");
  ASSERT_EQ(built.code, 0) << built.output;
  const json check = check_of(diagnose(work, search(folder)), file);
  EXPECT_NE(check["message"].get<std::string>().find("libzrtestgone.so: cannot open shared object file"),
            std::string::npos)
      << check;
  const std::string command = check["command"];
  EXPECT_EQ(command, "export LD_LIBRARY_PATH=" + folder + "${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}");
  const auto repaired = diagnose(work, search(folder) + "; " + command).checks("plug-ins", "optimizer 'lion'");
  ASSERT_FALSE(repaired.empty());
  EXPECT_EQ(repaired[0]["verdict"], "ok");
}

TEST(ZerothDoctor, ReportsFoldersOfTheSearchPath) {
  const Diagnosis missing = diagnose(Scratch(), search("/nowhere"));
  EXPECT_EQ(check_of(missing, "/nowhere")["verdict"], "warning");
  EXPECT_EQ(check_of(missing, "/nowhere")["command"], "unset ZR_PLUGIN_PATH");
  const Diagnosis relative = diagnose(Scratch(), search("plugins"));
  EXPECT_EQ(relative.code, 3);
  EXPECT_EQ(check_of(relative, "search path")["message"],
            "ZR_PLUGIN_PATH: 'plugins' is a relative path; write an absolute one");
}

TEST(ZerothDoctor, ChecksWhatAFileNeeds) {
  const Scratch work;
  const std::string disk = work.path("disk");
  work.write("job.toml",
             "[job]\nranks = 2\n[train]\nsteps = 1\n[checkpoint]\ndir = \"saved\"\n[offload]\noptimizer = \"nvme\"\n"
             "[offload.nvme]\npath = \"disk\"\n[model]\nwidth = 4\n");
  const Diagnosis before = diagnose(work, "", "job.toml");
  EXPECT_EQ(before.code, 3);
  EXPECT_EQ(before.checks("job", "job.toml")[0]["message"],
            "valid for 2 ranks; not checked, because the program was not started: model.width");
  const auto folders = before.checks("disk", "offload folder of 'nvme'");
  ASSERT_EQ(folders.size(), 1u);
  EXPECT_EQ(folders[0]["verdict"], "problem");
  EXPECT_EQ(folders[0]["message"], disk + ": No such file or directory");
  EXPECT_EQ(folders[0]["command"], "mkdir -p " + disk);
  EXPECT_EQ(before.checks("disk", "checkpoint folder").size(), 1u);

  ASSERT_EQ(shell("cd '" + work.folder().string() + "' && " + folders[0]["command"].get<std::string>()).code, 0);
  const Diagnosis after = diagnose(work, "", "job.toml");
  EXPECT_EQ(after.checks("disk", "offload folder of 'nvme'").size(), 2u) << "the folder, and O_DIRECT";
  EXPECT_NE(after.checks("disk", "offload folder of 'nvme'")[0]["verdict"], "problem");
  EXPECT_TRUE(fs::is_empty(disk));
  EXPECT_FALSE(fs::exists(work.path("saved")));
}

TEST(ZerothDoctor, ReportsAJobForADeviceThatIsMissing) {
  if (fs::exists("/dev/nvidiactl")) GTEST_SKIP() << "this machine may have a GPU";
  const Scratch work;
  work.write("job.toml", "[train]\nsteps = 1\n[job]\ndevice = \"cuda\"\n");
  const Diagnosis diagnosis = diagnose(work, "", "job.toml");
  EXPECT_EQ(diagnosis.code, 3);
  EXPECT_EQ(diagnosis.checks("devices", "device of the job")[0]["verdict"], "problem");
  const std::string message = diagnosis.checks("devices", "device of the job")[0]["message"];
  EXPECT_TRUE(message.starts_with("job.device = \"cuda\"; this libtorch was built for the CPU only") ||
              message ==
                  "job.device = \"cuda\"; this machine has no NVIDIA device, or no driver: install it, or set "
                  "job.device = \"cpu\"")
      << message;
}

TEST(ZerothDoctor, TreatsUnusedRejectedPluginsOfAJobAsWarnings) {
  const Scratch work;
  work.write("job.toml", "[train]\nsteps = 1\n");
  const std::string folder = ZR_BUILD_DIR "/tests/plugins/aborts";
  EXPECT_EQ(check_of(diagnose(work, search(folder), "job.toml"), folder)["verdict"], "warning");
  const Diagnosis uses = diagnose(work, search(folder), "job.toml optimizer=bad");
  EXPECT_EQ(uses.code, 3);
  EXPECT_EQ(uses.problems("job"), 1);
}

TEST(ZerothDoctor, ReportsAFileThatIsNotValid) {
  const Scratch work;
  work.write("job.toml", "[train]\nsteps = \"many\"\n");
  const Diagnosis diagnosis = diagnose(work, "", "job.toml");
  ASSERT_EQ(diagnosis.problems("job"), 1);
  EXPECT_NE(
      diagnosis.checks("job", "job.toml")[0]["message"].get<std::string>().find("job.toml:2:9: train.steps: expected "),
      std::string::npos);
  EXPECT_EQ(diagnosis.code, diagnosis.problems() == 1 ? 2 : 3);
}

TEST(ZerothDoctor, WritesTextAndJson) {
  const Scratch work;
  const auto run = shell("cd '" + work.folder().string() + "' && unset ZR_PLUGIN_PATH; " + kZeroth +
                         " doctor --json report.json 2>/dev/null");
  EXPECT_EQ(run.output.find("zeroth 0.1.0, plug-in ABI 0.9\n\nplug-ins\n  ok       communicator '"), 0u) << run.output;
  std::ifstream in(work.path("report.json"));
  const json report = json::parse(in, nullptr, false);
  ASSERT_TRUE(report.is_object());
  EXPECT_EQ(report["problems"] == 0, run.code == 0);
  EXPECT_NE(run.output.find(report["checks"][0]["message"].get<std::string>()), std::string::npos);
}

TEST(ZerothDoctor, WritesValidJsonForNamesThatAreNotUtf8) {
  const Scratch plugins, work;
  plugins.write("zr_optimizer_\xff\x1b[2J.so", "text");
  const Diagnosis diagnosis = diagnose(work, search(plugins.folder()));
  const json check = check_of(diagnosis, plugins.folder().string());
  EXPECT_EQ(check["name"], plugins.folder().string() + "/zr_optimizer_\xef\xbf\xbd\x1b[2J.so");
  ASSERT_EQ(
      shell("bash -c " + std::string("\"$(cat <<'END'\n") + check["command"].get<std::string>() + "\nEND\n)\"").code,
      0);
  EXPECT_EQ(diagnose(work, search(plugins.folder())).problems("plug-ins"), 0);
}

TEST(ZerothDoctor, RejectsWrongArguments) {
  for (const auto& [arguments, text] :
       {std::pair{"a.toml b.toml", "only one TOML file is allowed, not a.toml and b.toml"},
        {"train.steps=1", "train.steps=1 needs a TOML file"},
        {"--jsn x", "unrecognised option '--jsn'"}}) {
    const auto run = shell(kZeroth + " doctor " + arguments);
    EXPECT_EQ(run.code, 2) << arguments;
    EXPECT_NE(run.output.find(text), std::string::npos) << run.output;
  }
  const auto run = shell("cd /tmp && " + kZeroth + " doctor --json /nowhere/x");
  EXPECT_EQ(run.code, 3);
  EXPECT_NE(run.output.find("cannot write /nowhere/x: No such file or directory"), std::string::npos) << run.output;
}

}  // namespace
