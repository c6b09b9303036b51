// Other uses of checkpoints: partial loads, weights of other programs, export to other programs, and the commands.
#include <csignal>
#include <cstdlib>
#include <functional>
#include <regex>
#include <tuple>

#include "checkpoint/manifest.hpp"
#include "checkpoint/safetensors.hpp"
#include "checkpoint/save.hpp"
#include "multirank/checkpoint/bodies.hpp"
#include "support/sanitizers.hpp"

namespace zr::test {
namespace {

class CheckpointUseTest : public CheckpointTest {
 protected:
  // Trains two steps and saves a checkpoint after each, in folder c.
  void save(const std::string& overrides = "") {
    run(2, "job.name=a checkpoint.dir=c checkpoint.every=1 train.steps=2\n", "strategy=zero2 " + overrides);
  }
  // Writes the weights of folder c to `file` as another program would; `change` edits each tensor's name or shape.
  void exported_as(const std::string& file, const std::function<void(host::checkpoint::StoredTensor&)>& change) {
    ASSERT_EQ(shell(zeroth_bin() + "export c plain.safetensors --force").code, 0);
    std::ifstream in(scratch_.path("plain.safetensors"), std::ios::binary);
    const std::string bytes{std::istreambuf_iterator<char>(in), {}};
    host::checkpoint::TensorHeader header = host::checkpoint::read_header(scratch_.path("plain.safetensors"));
    const std::string data = bytes.substr(static_cast<std::size_t>(header.data));
    for (host::checkpoint::StoredTensor& tensor : header.tensors) change(tensor);
    scratch_.write(file, host::checkpoint::write_header(header) + data);
  }
  std::string says_hash(const std::string& overrides) {
    const Outcome done = run_pair(prints_hash, overrides);
    EXPECT_EQ(done.code, 0) << done.output;
    return done.lines().empty() ? "" : done.lines().back();
  }
};

TEST_F(CheckpointUseTest, InitLoadsWeightsOnly) {
  save();
  EXPECT_EQ(says_hash("checkpoint.init=c"), "step 0 hash " + hash("a"));
  EXPECT_EQ(says_hash("checkpoint.init=c/step-00000002 strategy=zero3"), "step 0 hash " + hash("a"));
  EXPECT_EQ(says_hash("checkpoint.dir=c checkpoint.resume=true"), "step 2 hash " + hash("a"));
}

RANK_BODY(is_killed_after_resuming, Run) {
  run.build();
  run.engine->barrier();
  if (run.engine->rank() == 1) ::raise(SIGKILL);
  run.engine->barrier();
}

TEST_F(CheckpointUseTest, FailureReportHasTheStepOfARankThatResumed) {
  save("parity.model=tiny");
  const Outcome done = run_pair(is_killed_after_resuming, "parity.model=tiny checkpoint.dir=c checkpoint.resume=true");
  EXPECT_EQ(done.code, 4) << done.output;
  EXPECT_TRUE(std::regex_search(done.output, std::regex("rank 0 .*, step 2\n"))) << done.output;
}

RANK_BODY(loads_what_fits, Run) {
  run.build();
  const zr::LoadReport loaded = run.engine->load(checkpoint_folder(), {false, false, false, false});
  const auto all = [&](const std::string& what, const std::vector<std::string>& names) {
    std::string text = what + ":";
    for (const std::string& name : names) text += " " + name;
    say(run, text);
  };
  all("missing", loaded.missing);
  all("unexpected", loaded.unexpected);
  all("other shape", loaded.other_shape);
  all("fresh", loaded.fresh);
}

TEST_F(CheckpointUseTest, NonMatchingTensorsAreRejectedOrListed) {
  save("parity.model=everything");
  const Outcome rejected = run_pair(prints_hash, "parity.model=recurrent checkpoint.init=c");
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  EXPECT_NE(rejected.output.find(": does not fit the model; missing: weight '"), std::string::npos) << rejected.output;
  EXPECT_NE(
      rejected.output.find(
          "set checkpoint.strict = false (in engine.load(), LoadOptions::strict) to load only the tensors that fit"),
      std::string::npos)
      << rejected.output;
  const Outcome listed = run_pair(loads_what_fits, "parity.model=recurrent");
  ASSERT_EQ(listed.code, 0) << listed.output;
  EXPECT_NE(listed.output.find("missing: weight 'lstm.weight_ih_l0'"), std::string::npos) << listed.output;
  EXPECT_NE(listed.output.find("unexpected: weight '"), std::string::npos) << listed.output;
  exported_as("flat.safetensors", [](host::checkpoint::StoredTensor& tensor) {
    if (tensor.name == "twice.weight") tensor.shape = {tensor.shape[0] * tensor.shape[1]};
  });
  const Outcome shape = run_pair(loads_what_fits, "parity.model=everything", "flat.safetensors");
  EXPECT_NE(shape.output.find("other shape: weight 'twice.weight'\n"), std::string::npos) << shape.output;
}

TEST_F(CheckpointUseTest, NewOptimizerReportsStatesItInitializes) {
  save("optimizer=adamw");
  const Outcome done = run_pair(prints_hash, "optimizer=sgd checkpoint.dir=c checkpoint.resume=true");
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_NE(done.output.find("optimizer 'sgd' starts states at zero; missing: state.momentum_buffer '"),
            std::string::npos)
      << done.output;
  EXPECT_NE(done.output.find("optimizer 'sgd' ignores saved states; unused: state.exp_avg '"), std::string::npos)
      << done.output;
  EXPECT_NE(done.output.find("step 2 hash " + hash("a")), std::string::npos) << done.output;
}

TEST_F(CheckpointUseTest, StatesOfAnotherDtypeAreRejectedOrRestart) {
  const std::string optimizer = "optimizer.use=adamw8bit optimizer.adamw8bit.min_8bit_elements=",
                    resume = "checkpoint.dir=c checkpoint.resume=true ";
  save(optimizer + "100000");
  const Outcome rejected = run_pair(prints_hash, resume + optimizer + "0");
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  EXPECT_NE(
      rejected.output.find("but optimizer 'adamw8bit' declares it as U8 with the keys of this job; set its keys as in "
                           "the checkpoint's configuration (facts.config of manifest.json), or set "
                           "checkpoint.strict = false to start such states at zero"),
      std::string::npos)
      << rejected.output;
  const Outcome restarted = run_pair(prints_hash, resume + optimizer + "0 checkpoint.strict=false");
  EXPECT_EQ(restarted.code, 0) << restarted.output;
  EXPECT_NE(restarted.output.find("optimizer 'adamw8bit' starts states at zero; missing: state."), std::string::npos)
      << restarted.output;
}

// A file of exported weights in the checkpoint folder is not taken for a checkpoint, and export does not overwrite
// checkpoints.
TEST_F(CheckpointUseTest, IgnoresOtherFilesInCheckpointFolder) {
  save("parity.model=tiny");
  ASSERT_EQ(shell(zeroth_bin() + "export c c/model.safetensors").code, 0);
  EXPECT_EQ(says_hash("parity.model=tiny checkpoint.dir=c checkpoint.resume=true"), "step 2 hash " + hash("a"));
  for (const std::string to : {"c", "c/step-00000002"}) {
    const Outcome rejected = shell(zeroth_bin() + "export c " + to);
    EXPECT_EQ(rejected.code, 2);
    EXPECT_NE(rejected.output.find(to + " contains checkpoints, which must not change; name another folder"),
              std::string::npos)
        << rejected.output;
  }
  EXPECT_EQ(shell(zeroth_bin() + "verify c").code, 0);
}

// A cluster queue may start a job once more after it has finished.
TEST_F(CheckpointUseTest, ResumedFinishedRunKeepsItsResult) {
  save("parity.model=tiny");
  const std::string before = summary("a").dump(), rows = Json(losses("a")).dump();
  run(2, "job.name=a checkpoint.dir=c checkpoint.resume=true train.steps=2\n", "strategy=zero2 parity.model=tiny");
  EXPECT_EQ(summary("a").dump(), before);
  EXPECT_EQ(Json(losses("a")).dump(), rows);
}

TEST_F(CheckpointUseTest, ConvertsDtypesOnlyOnRequest) {
  save("train.dtype=bf16 parity.model=everything");
  const std::string other = "parity.model=everything checkpoint.dir=c checkpoint.resume=true train.dtype=fp32 ";
  const Outcome rejected = run_pair(prints_hash, other);
  EXPECT_EQ(rejected.code, 2);
  EXPECT_NE(
      rejected.output.find(
          "is BF16, but train.dtype requires F32; set train.dtype to the checkpoint's dtype, or "
          "checkpoint.convert = true (in engine.load(), LoadOptions::convert), which converts from the fp32 master"),
      std::string::npos)
      << rejected.output;
  // The conversion reads the fp32 master weights, so no precision is lost.
  ASSERT_EQ(run_pair(resaves, other + "checkpoint.convert=true").code, 2)
      << "the program's own load() does not set convert";
  const Outcome done =
      shell("CHECKPOINT=d " + launch(2, engine_tests::trains,
                                     "strategy=zero1 train.steps=2 job.name=b " + other + "checkpoint.convert=true"));
  ASSERT_EQ(done.code, 0) << done.output;
  const Outcome said = run_pair(prints_hash, other + "checkpoint.convert=true");
  EXPECT_NE(said.output.find("step 2 hash " + hash("a")), std::string::npos)
      << said.output << "expected the hash of the fp32 master weights, " << hash("a");
}

TEST_F(CheckpointUseTest, FallsBackFromDamagedCheckpointOnlyOnRequest) {
  save();
  damage("c/step-00000002/model-00001-of-00001.safetensors");
  const Outcome rejected = run_pair(prints_hash, "checkpoint.dir=c checkpoint.resume=true");
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  EXPECT_NE(rejected.output.find("step-00000002/model-00001-of-00001.safetensors: buffer '"), std::string::npos)
      << rejected.output;
  const Outcome back = run_pair(prints_hash, "checkpoint.dir=c checkpoint.resume=true checkpoint.fallback=true");
  EXPECT_EQ(back.code, 0) << back.output;
  EXPECT_NE(back.output.find("/c/step-00000001"), std::string::npos) << back.output;
  EXPECT_NE(back.output.find("step 1 hash "), std::string::npos) << back.output;
}

// Damages the newest checkpoint in CHECKPOINT during training: load() fails and changes nothing; with fallback, it
// loads the previous checkpoint.
RANK_BODY(keeps_training, Run) {
  run.build();
  for (int i = 0; i < 2; ++i) {
    run.micro_step();
    run.engine->save(checkpoint_folder());
  }
  run.micro_step();
  const std::string hash = run.engine->weights_hash();
  if (run.engine->rank() == 0) {
    std::fstream file(checkpoint_folder() + "/step-00000002/exp_avg-00001-of-00001.safetensors",
                      std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(-9, std::ios::end);
    const char byte = static_cast<char>(file.peek() ^ 4);
    file.seekp(-9, std::ios::end);
    file.put(byte);
  }
  run.engine->mean(0);
  const std::string error = thrown_by([&] { run.engine->load(checkpoint_folder()); });
  say(run, error);
  EXPECT_NE(error.find("exp_avg-00001-of-00001.safetensors: state.exp_avg '"), error.npos)
      << "the error names file and tensor";
  EXPECT_TRUE(run.engine->weights_hash() == hash && run.engine->step_index() == 3)
      << "a failed load changes nothing in the model";
  zr::LoadOptions how;
  how.fallback = true;
  const zr::LoadReport loaded = run.engine->load(checkpoint_folder(), how);
  EXPECT_TRUE(loaded.folder == checkpoint_folder() + "/step-00000001" && run.engine->step_index() == 1)
      << "fallback loads the previous checkpoint";
  run.train();
}

TEST_F(CheckpointUseTest, FailedLoadOfDamagedCheckpointLeavesModelUnchanged) {
  const Outcome done = run_pair(keeps_training);
  EXPECT_EQ(done.code, 0) << done.output;
}

// Loads exported weights under different names, as another program would have written them.
TEST_F(CheckpointUseTest, LoadsWeightsOfOtherProgramsByRenameRules) {
  save("parity.model=everything");
  ASSERT_EQ(shell(zeroth_bin() + "export c plain.safetensors --force").code, 0);
  EXPECT_EQ(says_hash("parity.model=everything checkpoint.init=plain.safetensors"), "step 0 hash " + hash("a"));
  exported_as("foreign/model.safetensors", [](host::checkpoint::StoredTensor& tensor) {
    const auto dot = tensor.name.find('.');
    if (dot != std::string::npos) tensor.name[dot] = '/';
    tensor.name = "model." + tensor.name;
  });
  const Outcome rejected = run_pair(prints_hash, "parity.model=everything checkpoint.init=foreign");
  EXPECT_EQ(rejected.code, 2) << rejected.output;
  const std::string rules = " \"checkpoint.rename={'*.*'='model.*/*','*'='model.*'}\"";
  EXPECT_EQ(says_hash("parity.model=everything checkpoint.init=foreign" + rules), "step 0 hash " + hash("a"));
  const Outcome wrong = run_pair(prints_hash,
                                 "parity.model=everything checkpoint.init=foreign "
                                 "\"checkpoint.rename={'twice.wieght'='model.twice/weight'}\"");
  EXPECT_EQ(wrong.code, 2);
  EXPECT_NE(wrong.output.find("checkpoint.rename: 'twice.wieght' matches no weight of the model; the nearest is "
                              "'twice.weight'"),
            std::string::npos)
      << wrong.output;
}

TEST_F(CheckpointUseTest, PythonSafetensorsReadsSavedWeights) {
  for (const std::string dtype : {"fp32", "bf16"}) {
    fs::remove_all(scratch_.path("c"));
    save("parity.model=everything train.dtype=" + dtype);
    const Outcome read = shell(ZR_SOURCE_DIR "/build/deps/python/bin/python " ZR_SOURCE_DIR
                                             "/tests/multirank/checkpoint/read_safetensors.py c/step-00000002");
    ASSERT_EQ(read.code, 0) << read.output;
    // Compare every value that Python read with the value that zr::host::checkpoint::Checkpoint reads.
    const host::checkpoint::Checkpoint checkpoint(scratch_.path("c/step-00000002"));
    std::istringstream lines(read.output);
    std::size_t seen = 0, values = 0;
    for (std::string line; std::getline(lines, line); ++seen) {
      std::istringstream words(line);
      std::string name, type, hex;
      words >> name >> type >> hex;
      const host::checkpoint::SavedTensor* saved = checkpoint.find("weight", name);
      if (!saved) saved = checkpoint.find("buffer", name);
      ASSERT_NE(saved, nullptr) << name;
      std::string bytes(static_cast<std::size_t>(saved->bytes()), '\0');
      checkpoint.read(*saved, 0, saved->bytes(), bytes.data());
      std::string own;
      for (const char c : bytes) {
        own += "0123456789abcdef"[static_cast<unsigned char>(c) >> 4];
        own += "0123456789abcdef"[c & 15];
      }
      EXPECT_EQ(type, saved->dtype == "F32" ? "float32" : saved->dtype == "BF16" ? "bfloat16" : "int64") << name;
      EXPECT_TRUE(own == hex) << name;
      values += static_cast<std::size_t>(saved->bytes() / host::checkpoint::stored_size(saved->dtype));
    }
    std::size_t stored = 0;
    for (const host::checkpoint::SavedTensor& tensor : checkpoint.manifest().tensors)
      stored += tensor.kind == "weight" || tensor.kind == "buffer";
    EXPECT_EQ(seen, stored);
    EXPECT_GT(values, 40000u);
  }
}

TEST_F(CheckpointUseTest, VerifyAndShowDescribeCheckpoints) {
  save("parity.model=tiny");
  const Outcome verified = shell(zeroth_bin() + "verify c");
  EXPECT_EQ(verified.code, 0);
  EXPECT_EQ(verified.lines().size(), 2u) << verified.output;
  const Outcome shown = shell(zeroth_bin() + "show c");
  EXPECT_EQ(shown.code, 0);
  EXPECT_EQ(shown.output.find("c/step-00000002: step 2 of run "), 0u) << shown.output;
  EXPECT_NE(shown.output.find("written by 2 ranks under zero2 with adamw"), std::string::npos);
  EXPECT_NE(shown.output.find("state.exp_avg_sq"), std::string::npos);
  damage("c/step-00000002/exp_avg-00001-of-00001.safetensors");
  const Outcome damaged = shell(zeroth_bin() + "verify c");
  EXPECT_EQ(damaged.code, 2);
  EXPECT_NE(damaged.output.find("c/step-00000001: intact"), std::string::npos) << damaged.output;
  EXPECT_NE(damaged.output.find("exp_avg-00001-of-00001.safetensors: state.exp_avg '"), std::string::npos)
      << damaged.output;
  const Outcome none = shell(zeroth_bin() + "show runs");
  EXPECT_EQ(none.code, 2);
  EXPECT_NE(none.output.find("runs: contains no committed checkpoint; name the folder that was given to "
                             "engine.save() or checkpoint.dir"),
            std::string::npos)
      << none.output;
}

TEST_F(CheckpointUseTest, CommandsShowProgressOnlyOnTerminal) {
  save();
  for (const auto& [command, bar] : {std::pair{"show c", "opening c/step-00000002 ["},
                                     {"verify c", "c/step-00000001 ["},
                                     {"export c out", "exporting to out ["}}) {
    const Outcome shown = shell("script -qec '" + zeroth_bin() + command + "' /dev/null");
    ASSERT_EQ(shown.code, 0) << shown.output;
    EXPECT_NE(shown.output.find(bar + std::string("#########################] 100 %")), std::string::npos)
        << shown.output;
    EXPECT_EQ(shell(zeroth_bin() + command).output.find("100 %"), std::string::npos) << command;
  }
}

TEST_F(CheckpointUseTest, ExportUsesRequestedDtypeAndFileSize) {
  save("parity.model=everything train.dtype=bf16");
  ASSERT_EQ(shell(zeroth_bin() + "export c out --dtype fp32 --file-size 8KiB").code, 0);
  const host::checkpoint::Checkpoint from(scratch_.path("c/step-00000002")), out(scratch_.path("out"));
  EXPECT_TRUE(out.from_other_program());
  EXPECT_GT(out.manifest().files.size(), 3u);
  for (const host::checkpoint::SavedTensor& tensor : from.manifest().tensors) {
    if (tensor.kind != "weight") continue;
    const host::checkpoint::SavedTensor *exported = out.find("weight", tensor.name),
                                        *master = from.find("master", tensor.name);
    ASSERT_NE(exported, nullptr) << tensor.name;
    EXPECT_EQ(exported->dtype, "F32");
    if (!master) continue;  // frozen
    std::string a(static_cast<std::size_t>(master->bytes()), '\0'), b = a;
    from.read(*master, 0, master->bytes(), a.data());
    out.read(*exported, 0, master->bytes(), b.data());
    EXPECT_TRUE(a == b) << tensor.name << " differs from its master weight";
  }
}

// Exports 660 MiB of bf16 weights with 1320 MiB of fp32 master weights in an address space of 64 MiB.
TEST_F(CheckpointUseTest, SLOW_ExportsModelTenTimesLargerThanMemory) {
  if (kSanitized) GTEST_SKIP() << kSanitizerMemory;
  constexpr int64_t kElements = int64_t{15} << 20;
  const std::vector<char> memory(kElements * 4, '\x3c');
  host::checkpoint::CheckpointContents image;
  image.step = 1;
  image.run = "test";
  image.metadata_json = host::checkpoint::to_text(host::checkpoint::CheckpointMetadata());
  for (int i = 0; i < 22; ++i)
    for (const auto& [role, dtype, size] : {std::tuple{"weight", "BF16", 2}, {"master", "F32", 4}}) {
      image.slabs.push_back({static_cast<uint32_t>(image.tensors.size()), 0, kElements * size, memory.data()});
      image.tensors.push_back({role, "w" + std::to_string(i), dtype, {kElements}, {}});
    }
  host::checkpoint::save(scratch_.path("large"), image, host::checkpoint::single_rank_comm(), {});
  const std::string limit = "prlimit --as=" + std::to_string(64 << 20) + " ";
  EXPECT_NE(shell(limit + "python3 -c 'bytearray(100 << 20)'").code, 0) << "the address-space limit must be in effect";
  const Outcome done = shell(limit + zeroth_bin() + "export large exported.safetensors --dtype fp32");
  ASSERT_EQ(done.code, 0) << done.output;
  EXPECT_EQ(fs::file_size(scratch_.path("exported.safetensors")) >> 20, 22u * 60);
}

}  // namespace
}  // namespace zr::test
