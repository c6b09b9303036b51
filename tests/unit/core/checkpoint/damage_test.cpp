// A changed, truncated or forged checkpoint is rejected; the message names file, tensor and offset.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "base/hex.hpp"
#include "base/process_exit.hpp"
#include "checkpoint/safetensors.hpp"
#include "ranks.hpp"
#include "support/scratch.hpp"

namespace zr::test {
namespace {

namespace fs = std::filesystem;

class CheckpointDamageTest : public ::testing::Test {
 protected:
  CheckpointDamageTest() : model_(3) {
    save(root_, image_of(model_, 1, 0, 1), checkpoint::single_rank_comm(), kSmall);
    folder_ = checkpoint::find_checkpoint(root_);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder_)) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  }
  std::string path(const std::string& name) const { return (fs::path(folder_) / name).string(); }
  // The error of loading it; empty if it loads.
  std::string refusal() const try {
    const checkpoint::Checkpoint checkpoint(folder_);
    checkpoint.verify([](int64_t) {});
    return "";
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit_code::user) << failure.what();
    return failure.what();
  }
  Scratch scratch_;
  std::string root_ = scratch_.path("c"), folder_;
  Model model_;
};

TEST_F(CheckpointDamageTest, AReadThatDoesNotReturnIsNamedAndEndsTheProcess) {
  const auto verify = [this](const char* call) {
    ::setenv("ZR_FAILPOINT", call, 1);
    ::setenv("ZR_READ_SECONDS", "2.4", 1);
    set_exit_function([](int code) { std::_Exit(code); });
    refusal();
  };
  for (const char* call : {"read=STALL@1", "read=STALL@5"})
    EXPECT_EXIT(verify(call), testing::ExitedWithCode(3),
                "zeroth: waiting for .*/step-.*/[^ ]* to be read at byte [0-9]+, for at most 2.4 s .ZR_READ_SECONDS.\n"
                "zeroth: error: .*/step-.*/[^ ]*: reading at byte [0-9]+ did not return within 2.4 s: its file system "
                "does not answer; check the mount, or set the environment variable ZR_READ_SECONDS to more seconds\n")
        << call;
}

TEST_F(CheckpointDamageTest, DetectsAFlippedBitAnywhere) {
  std::mt19937 random(1);
  int flips = 0;
  for (const std::string& name : files()) {
    const std::string complete = read_file(path(name));
    for (int i = 0; i < 40; ++i, ++flips) {
      std::string changed = complete;
      const std::size_t at = i < 10 ? static_cast<std::size_t>(i) * 7 % complete.size() : random() % complete.size();
      changed[at] = static_cast<char>(changed[at] ^ (1 << random() % 8));
      std::ofstream(path(name), std::ios::binary) << changed;
      EXPECT_NE(refusal().find(name), std::string::npos) << name << " at " << at << ": " << refusal();
    }
    std::ofstream(path(name), std::ios::binary) << complete;
  }
  EXPECT_EQ(refusal(), "");
  std::printf("%d flipped bits, all detected\n", flips);
}

TEST_F(CheckpointDamageTest, NamesFileTensorAndOffset) {
  const checkpoint::Checkpoint checkpoint(folder_);
  const checkpoint::SavedTensor* tensor = checkpoint.find("master", "block.weight");
  const std::string name = checkpoint.manifest().files[tensor->file].name;
  std::string bytes = read_file(path(name));
  bytes[static_cast<std::size_t>(tensor->offset) + 5000] ^= 1;
  std::ofstream(path(name), std::ios::binary) << bytes;
  EXPECT_EQ(refusal(), path(name) +
                           ": master 'block.weight' was changed since it was written, within the 4096 bytes at " +
                           std::to_string(tensor->offset + 4096) +
                           "; load another checkpoint (`zeroth verify` reports which are intact)");
}

TEST_F(CheckpointDamageTest, DetectsATruncatedOrMissingFile) {
  for (const std::string& name : files()) {
    const std::string complete = read_file(path(name));
    for (const std::size_t left : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, complete.size() - 1}) {
      if (left >= complete.size()) continue;
      std::ofstream(path(name), std::ios::binary) << complete.substr(0, left);
      EXPECT_NE(refusal().find(name), std::string::npos) << name << " of " << left << " bytes: " << refusal();
    }
    fs::remove(path(name));
    EXPECT_NE(refusal().find(name), std::string::npos) << name << " lost: " << refusal();
    std::ofstream(path(name), std::ios::binary) << complete;
  }
}

TEST_F(CheckpointDamageTest, NamesBothStepsForAFileOfAnotherStep) {
  save(root_, image_of(model_, 2, 0, 1), checkpoint::single_rank_comm(), kSmall);
  const std::string name = "master-00001-of-00003.safetensors";
  ASSERT_TRUE(fs::exists(path(name)));
  fs::copy_file(fs::path(root_) / checkpoint::checkpoint_name(2) / name, path(name),
                fs::copy_options::overwrite_existing);
  EXPECT_NE(refusal().find(name + ": belongs to step 2 of run job, but the checkpoint is step 1 of run job"),
            std::string::npos)
      << refusal();
  checkpoint::CheckpointContents other = image_of(model_, 1, 0, 1);
  other.run = "another";
  save(scratch_.path("other"), other, checkpoint::single_rank_comm(), kSmall);
  fs::copy_file(fs::path(scratch_.path("other")) / checkpoint::checkpoint_name(1) / name, path(name),
                fs::copy_options::overwrite_existing);
  EXPECT_NE(refusal().find(name + ": belongs to step 1 of run another, but the checkpoint is step 1 of run job"),
            std::string::npos)
      << refusal();
}

TEST_F(CheckpointDamageTest, RejectsAHostileManifest) {
  const checkpoint::Manifest complete = checkpoint::Checkpoint(folder_).manifest();
  const auto rejected = [&](const std::function<void(checkpoint::Manifest&)>& change, const std::string& text) {
    checkpoint::Manifest manifest = complete;
    change(manifest);
    std::ofstream(path(checkpoint::kManifest), std::ios::binary) << checkpoint::to_text(manifest);
    EXPECT_NE(refusal().find(text), std::string::npos) << refusal();
  };
  rejected([](checkpoint::Manifest& m) { m.files[0].name = "../../secret.safetensors"; },
           "is not the name of a file in its folder");
  rejected([](checkpoint::Manifest& m) { m.files[0].name = "/etc/passwd"; }, "is not the name of a file in its folder");
  rejected([](checkpoint::Manifest& m) { m.tensors[0].offset = m.tensors[1].offset; }, "");
  rejected([](checkpoint::Manifest& m) { m.tensors[0].offset = int64_t{1} << 62; }, "is outside the data of");
  rejected([](checkpoint::Manifest& m) { m.tensors[0].offset = -8; }, "has an invalid offset in");
  rejected(
      [](checkpoint::Manifest& m) {
        for (checkpoint::SavedTensor& tensor : m.tensors)
          if (tensor.kind == "master" && tensor.name == "block.weight") tensor.shape = {16384};
      },
      "master 'block.weight' does not match the shape of its weight");
  rejected(
      [](checkpoint::Manifest& m) {
        m.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40};
      },
      "an unknown dtype or an invalid shape");
  rejected([](checkpoint::Manifest& m) { m.tensors[0].shape = {-1}; }, "an invalid shape");
  rejected([](checkpoint::Manifest& m) { m.tensors[0].file = 999; }, "in a file that is not listed");
  rejected([](checkpoint::Manifest& m) { m.tensors[0].chunks.pop_back(); }, "do not cover the tensor");
  rejected([](checkpoint::Manifest& m) { m.tensors[0].chunks[0].bytes = int64_t{1} << 50; }, "do not cover the tensor");
  rejected([](checkpoint::Manifest& m) { m.tensors.push_back(m.tensors[0]); }, "is listed twice");
  rejected(
      [](checkpoint::Manifest& m) {
        m.tensors.push_back(m.tensors[0]);
        m.tensors.back().name = "other";
      },
      "overlaps another tensor");
}

// The manifest's hash is correct, so that only the changed values can cause the error.
TEST_F(CheckpointDamageTest, RejectsAManifestWithInvalidNumbers) {
  const std::string complete = read_file(path(checkpoint::kManifest));
  const std::size_t begin = complete.find("\"manifest\":") + 11;
  const std::string body = complete.substr(begin, complete.size() - begin - 2);
  const auto rejected = [&](const std::string& from, const std::string& to, const std::string& why) {
    std::string changed = body;
    const std::size_t at = changed.find(from);
    ASSERT_NE(at, std::string::npos) << from;
    changed.replace(at, from.size(), to);
    std::ofstream(path(checkpoint::kManifest), std::ios::binary)
        << "{\"xxh3\":\"" << hex(checkpoint::hash_of(changed.data(), static_cast<int64_t>(changed.size())))
        << "\",\n\"manifest\":" << changed << "}\n";
    EXPECT_NE(refusal().find(why), std::string::npos) << to.substr(0, 60) << ": " << refusal();
  };
  rejected("\"facts\":{", "\"facts\":{\"deep\":" + std::string(300000, '[') + std::string(300000, ']') + ",",
           "nested too deeply");
  rejected("\"step\":1,\"tensors\"", "\"step\":-1,\"tensors\"",
           "'step' is -1, expected an integer from 0 to 2147483647");
  rejected("\"step\":1,\"tensors\"", "\"step\":1e300,\"tensors\"",
           "'step' is 1e+300, expected an integer from 0 to 2147483647");
  rejected("\"step\":1,\"tensors\"", "\"step\":9223372036854775808,\"tensors\"",
           "'step' is 9223372036854775808, expected an integer");
  rejected("\"shape\":[", "\"shape\":[1.5,", "an invalid shape");
  rejected("\"data\":", "\"data\":99999999999,\"was\":", "has an invalid data offset, 99999999999");
  rejected("\"at\":", "\"at\":1e19,\"was\":", "has an invalid offset in");
}

TEST(SafetensorsHeaderTest, RejectsInconsistentHeaders) {
  const auto rejected = [](const std::string& text, int64_t bytes, const std::string& why) {
    try {
      checkpoint::parse_header("f", text, 8, bytes);
      ADD_FAILURE() << text << " is accepted";
    } catch (const Error& failure) {
      EXPECT_NE(std::string(failure.what()).find(why), std::string::npos) << failure.what();
    }
  };
  rejected("[]", 8, "not a JSON object");
  rejected("{", 8, "not a JSON object");
  rejected(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
      16, "'a' twice");
  rejected(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}})", 17, "needs 8 bytes for its shape");
  rejected(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 16, "needs 8 bytes for its shape");
  rejected(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
      20, "'b' begins at byte 4");
  rejected(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", 24, "'a' begins at byte 8");
  rejected(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 15, "its tensors end at byte 16");
  rejected(R"({"a":{"dtype":"F77","shape":[2],"data_offsets":[0,8]}})", 16, "is not supported");
  rejected(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", 16,
           "invalid shape for 'a'");
  rejected(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 16, "are not two valid offsets");
  rejected(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[9223372036854775808,0]}})", 16,
           "are not two valid offsets");
  rejected(R"({"a":{"dtype":"U8","shape":[9223372036854775807],"data_offsets":[0,9223372036854775807]}})", 16,
           "its tensors end at byte 9223372036854775815");
  rejected(R"({"a":{"dtype":"F32","shape":[2.5],"data_offsets":[0,8]}})", 16, "invalid shape for 'a'");
  rejected("{\"a\":" + std::string(100000, '['), 16, "not a JSON object");
}

}  // namespace
}  // namespace zr::test
