// The exact exit codes and messages of zeroth verify, show and export for invalid checkpoints and for output that
// cannot be written (checkpoint_errors.txt).
#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/hex.hpp"
#include "checkpoint/folder.hpp"
#include "checkpoint/save.hpp"
#include "cli/checkpoint_commands.hpp"
#include "support/golden_cases.hpp"
#include "support/scratch.hpp"
#include "support/shell.hpp"

namespace zr::test {
namespace {

namespace fs = std::filesystem;
const std::string kBin = ZR_BUILD_DIR "/bin";

// Saves a small checkpoint of step 12: two ranks' buffers, one weight, one optimizer state.
void save_small(const std::string& root, int64_t step = 12) {
  static const std::vector<float> values(64, 0.5F);
  host::checkpoint::CheckpointMetadata metadata;
  metadata.updates = std::min<int64_t>(step, 10);
  metadata.samples = 96;
  metadata.parameter_steps = {{"line.weight", metadata.updates}};
  metadata.optimizer = "adamw";
  metadata.slots = {"exp_avg"};
  metadata.globals = {{"power", "\x01\x02"}};
  metadata.world = 2;
  metadata.strategy = "zero1";
  metadata.config = "[train]\nsteps = 20\n";
  host::checkpoint::CheckpointContents image{step, "job-1", host::checkpoint::to_text(metadata), true, {}, {}};
  for (const host::checkpoint::TensorInfo& tensor :
       std::vector<host::checkpoint::TensorInfo>{{"weight", "line.weight", "F32", {4, 3}, {}},
                                                 {"state.exp_avg", "line.weight", "F32", {4, 3}, {}},
                                                 {"buffer", "level", "F32", {3}, {}},
                                                 {host::checkpoint::kRankBuffer, "level", "F32", {2, 3}, {}}}) {
    image.slabs.push_back({static_cast<uint32_t>(image.tensors.size()), 0, tensor.bytes(), values.data()});
    image.tensors.push_back(tensor);
  }
  host::checkpoint::save(root, image, host::checkpoint::single_rank_comm(), {});
}

// Replaces text in the manifest of c/step-00000012 and recomputes its hash, as an attacker would.
void change_manifest(const Scratch& scratch, const std::string& from, const std::string& to) {
  const std::string path = scratch.path("c/step-00000012/manifest.json"), text = host::read_file(path);
  const std::size_t begin = text.find("\"manifest\":") + 11;
  std::string body = text.substr(begin, text.size() - begin - 2);
  const std::size_t at = body.find(from);
  ASSERT_NE(at, std::string::npos) << from << " is not in " << body;
  body.replace(at, from.size(), to);
  std::ofstream(path, std::ios::binary) << "{\"xxh3\":\""
                                        << host::hex(host::checkpoint::hash_of(body.data(),
                                                                               static_cast<int64_t>(body.size())))
                                        << "\",\n\"manifest\":" << body << "}\n";
}

testing::Outcome run(const Scratch& scratch, const std::string& words) {
  return testing::shell("export PATH=" + kBin + ":$PATH; cd " + scratch.folder().string() + " && timeout 60 " + words);
}

TEST(CheckpointCommandsTest, PrintTheErrorsOfTheGoldenFile) {
  golden::check(ZR_SOURCE_DIR "/tests/golden/checkpoint_errors.txt", 40, [](const golden::Case& one) {
    const Scratch scratch;
    save_small(scratch.path("c"));
    std::istringstream lines(one["prepare"]);
    for (std::string line; std::getline(lines, line);) {
      const auto arrow = line.find(" => ");
      if (line.starts_with("change ") && arrow != line.npos)
        change_manifest(scratch, line.substr(7, arrow - 7), line.substr(arrow + 4));
      else
        EXPECT_EQ(run(scratch, "bash -c '" + line + "'").code, 0) << line;
    }
    const testing::Outcome done = run(scratch, one["run"]);
    // The other commands reject the same checkpoint with the same message.
    if (one["run"] == "zeroth verify c" && done.code != 0)
      for (const std::string other : {"zeroth show c", "zeroth export c out.safetensors"}) {
        const testing::Outcome same = run(scratch, other);
        EXPECT_EQ(same.code, done.code) << one.title << ": " << other;
        EXPECT_EQ(same.output, "zeroth: error: " + done.output) << one.title << ": " << other;
      }
    std::string output = done.output;
    for (auto at = output.find(scratch.folder().string()); at != output.npos;
         at = output.find(scratch.folder().string()))
      output.replace(at, scratch.folder().string().size(), "{folder}");
    golden::trim_newlines(output);
    return std::vector<golden::ProducedPart>{{"exit", done.code == 0 ? "" : std::to_string(done.code)},
                                             {"says", output}};
  });
}

// A failed export leaves no partial output and does not change files that it must not overwrite.
TEST(ZerothExport, LeavesAndChangesNoFileWhenItFails) {
  const Scratch scratch;
  save_small(scratch.path("c"));
  const std::string own = "c/step-00000012/model-00001-of-00001.safetensors",
                    before = host::read_file(scratch.path(own));
  const auto names = [&] {
    std::vector<std::string> all;
    for (const auto& entry : fs::recursive_directory_iterator(scratch.folder())) all.push_back(entry.path());
    std::sort(all.begin(), all.end());
    return all;
  };
  fs::create_hard_link(scratch.path(own), scratch.path("hard.safetensors"));
  fs::create_symlink(scratch.path(own), scratch.path("soft.safetensors"));
  fs::create_directory_symlink(scratch.path("c/step-00000012"), scratch.path("link"));
  const auto all = names();
  for (const std::string& to : {own, std::string("hard.safetensors"), std::string("soft.safetensors"),
                                std::string("c/../") + own, std::string("link/model-00001-of-00001.safetensors"),
                                std::string("link/new.safetensors"), std::string("c/step-00000012")})
    for (const std::string force : {"", " --force"}) {
      const testing::Outcome done = run(scratch, "zeroth export c " + to + force);
      EXPECT_EQ(done.code, 2) << to << force << "\n" << done.output;
      EXPECT_EQ(host::read_file(scratch.path(own)), before) << to << force;
      EXPECT_EQ(names(), all) << to << force;
    }
  for (const std::string to : {"out.safetensors", "out/below"}) {  // a file size limit of 100 bytes
    const testing::Outcome done =
        run(scratch, "bash -c 'trap \"\" XFSZ; prlimit --fsize=100 zeroth export c " + to + "'");
    EXPECT_NE(done.code, 0);
    fs::remove(scratch.path("out"));  // created for out/below
    EXPECT_EQ(names(), all) << to << "\n" << done.output;
  }
  EXPECT_EQ(run(scratch, "zeroth verify c").code, 0);
}

TEST(ZerothExport, ReplacesAFileOnlyWithForce) {
  const Scratch scratch;
  save_small(scratch.path("c"));
  scratch.write("out.safetensors", "mine");
  EXPECT_EQ(run(scratch, "zeroth export c out.safetensors").code, 2);
  EXPECT_EQ(host::read_file(scratch.path("out.safetensors")), "mine");
  EXPECT_EQ(run(scratch, "zeroth export c out.safetensors --force").code, 0);
  const std::string exported = host::read_file(scratch.path("out.safetensors"));
  EXPECT_GT(exported.size(), 100u);
  ASSERT_EQ(run(scratch, "zeroth export c out").code, 0);
  const testing::Outcome again = run(scratch, "zeroth export c out");
  EXPECT_EQ(again.code, 2) << again.output;
  EXPECT_EQ(run(scratch, "zeroth export c out --force").output, "");
  scratch.write("out/model-00001-of-00009.safetensors", "of an earlier export");
  EXPECT_EQ(
      run(scratch, "zeroth export c out --force").output,
      "zeroth: warning: out also contains model-00001-of-00009.safetensors, which the new index does not list; remove "
      "the files of earlier exports\n");
}

// A job with checkpoint.keep removes and replaces checkpoints while they are verified.
TEST(ZerothVerify, ReportsNoLossWhenAnotherProcessRemovesOrReplacesCheckpoints) {
  const Scratch scratch;
  for (const int64_t step : {1, 2, 3}) save_small(scratch.path("c"), step);
  int begun = 0;
  ::testing::internal::CaptureStdout();
  const int code = host::cli::verify_checkpoints(scratch.path("c"), [&](const std::string& folder) {
    if (++begun == 1) {  // removed, and a new one saved
      fs::rename(folder, folder + ".removed");
      save_small(scratch.path("c"), 4);
    } else if (begun == 2) {  // replaced by another of the same step
      fs::rename(folder, folder + ".removed");
      fs::copy(folder + ".removed", folder);
      fs::remove(folder + ".removed/manifest.json");
    }
  });
  const std::string said = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, 0) << said;
  for (const char* step : {"2", "3", "4"})
    EXPECT_NE(said.find("step-0000000" + std::string(step) + ": intact, step " + step), std::string::npos) << said;
  EXPECT_NE(said.find("step-00000001: not verified: another process removed this checkpoint meanwhile"),
            std::string::npos)
      << said;
  fs::remove(scratch.path("c/step-00000003/manifest.json"));  // a loss that no other process caused
  EXPECT_EQ(host::cli::verify_checkpoints(scratch.path("c")), 2);
}

TEST(ZerothVerify, FailsWhenEveryCheckpointIsRemovedBeforeItIsVerified) {
  const Scratch scratch;
  save_small(scratch.path("c"), 1);
  try {
    host::cli::verify_checkpoints(scratch.path("c"), [](const std::string& folder) { fs::remove_all(folder); });
    ADD_FAILURE() << "verify must fail: no checkpoint was verified";
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit_code::user);
    EXPECT_EQ(
        failure.what(),
        scratch.path("c") + ": another process removed all checkpoints before one was verified; run the command again");
  }
}

TEST(ZerothVerify, DistinguishesARemovedCheckpointFromADamagedOne) {
  const Scratch scratch;
  save_small(scratch.path("c"), 1);
  const std::string folder = scratch.path("c/step-00000001");
  int begun = 0;
  ::testing::internal::CaptureStdout();
  const int code = host::cli::verify_checkpoints(folder, [&](const std::string&) {
    if (++begun == 1) {  // replaced while it is opened
      fs::rename(folder, folder + ".removed");
      fs::create_directory(folder);
    } else if (begun == 2) {
      fs::remove(folder);
      fs::rename(folder + ".removed", folder);
    }
  });
  const std::string said = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(code, 0);
  EXPECT_EQ(said, folder + ": intact, step 1, 4 tensors, 132 B\n");
  try {
    host::cli::verify_checkpoints(folder, [&](const std::string&) { fs::remove_all(folder); });
    ADD_FAILURE() << "verify must fail: the checkpoint was removed";
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit_code::user);
    EXPECT_EQ(failure.what(), folder +
                                  ": another process removed this checkpoint during the verification, so its state "
                                  "is unknown; verify another checkpoint");
  }
}

// Exit code of a command whose standard output is `fd`.
int code_with_output(int fd, const std::vector<std::string>& words, const std::string& folder) {
  const pid_t child = ::fork();
  if (child == 0) {
    ::signal(SIGPIPE, SIG_DFL);
    const int null = ::open("/dev/null", O_WRONLY);
    if (::chdir(folder.c_str()) != 0) ::_exit(99);
    ::dup2(fd, STDOUT_FILENO);
    ::dup2(null, STDERR_FILENO);
    std::vector<char*> argv;
    for (const std::string& word : words) argv.push_back(const_cast<char*>(word.c_str()));
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    ::_exit(98);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST(Zeroth, FailsWhenItsOutputCannotBeWritten) {
  const Scratch scratch;
  save_small(scratch.path("c"));
  scratch.write("job.toml", "[train]\nsteps = 1\nmicro_batch = 1\n");
  const std::string zeroth = kBin + "/zeroth";
  const std::vector<std::vector<std::string>> commands{{zeroth, "--help"},
                                                       {zeroth, "--version"},
                                                       {zeroth, "verify", "c"},
                                                       {zeroth, "show", "c"},
                                                       {zeroth, "plugins"},
                                                       {zeroth, "plan", "--params", "1e6", "-n", "2"},
                                                       {zeroth, "train", "-h"},
                                                       {zeroth, "explain", "job.toml"},
                                                       {zeroth, "launch", "-n", "1", "--", "/bin/echo", "hello"}};
  for (const auto& words : commands) {
    const int full = ::open("/dev/full", O_WRONLY), null = ::open("/dev/null", O_WRONLY);
    std::array<int, 2> pipe{};
    ASSERT_EQ(::pipe(pipe.data()), 0);
    ::close(pipe[0]);
    EXPECT_EQ(code_with_output(null, words, scratch.path("")), 0) << words[1];
    EXPECT_EQ(code_with_output(full, words, scratch.path("")), 3) << words[1] << " on a full disk";
    const int code = words[1] == "launch" ? 3 : 128 + SIGPIPE;  // as of other programs; a job, however, has failed
    EXPECT_EQ(code_with_output(pipe[1], words, scratch.path("")), code) << words[1] << " on a closed pipe";
    for (const int fd : {full, null, pipe[1]}) ::close(fd);
  }
}

}  // namespace
}  // namespace zr::test
