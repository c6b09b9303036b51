// A checkpoint that was changed, cut off or made up is refused, naming file, tensor and offset.
#include <algorithm>
#include <filesystem>
#include <fstream>

#include "checkpoint/safetensors.hpp"
#include "ranks.hpp"
#include "scratch.hpp"

namespace zr::test {
namespace {

namespace fs = std::filesystem;

class Damaged : public testing::Test {
 protected:
  Damaged() : model_(3) {
    save(root_, image_of(model_, 1, 0, 1), alone(), kSmall);
    folder_ = find_checkpoint(root_);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> all;
    for (const auto& entry : fs::directory_iterator(folder_)) all.push_back(entry.path().filename());
    std::sort(all.begin(), all.end());
    return all;
  }
  std::string path(const std::string& name) const { return (fs::path(folder_) / name).string(); }
  // What refuses it; empty: nothing does.
  std::string refusal() const try {
    const Checkpoint checkpoint(folder_);
    checkpoint.verify([](int64_t) {});
    return "";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.exit(), Exit::user) << failure.what();
    return failure.what();
  }
  Scratch scratch_;
  std::string root_ = scratch_.path("c"), folder_;
  Model model_;
};

TEST_F(Damaged, ByOneBitAnywhereIsRefused) {
  std::mt19937 random(1);
  int flips = 0;
  for (const std::string& name : files()) {
    if (name == kIndex) continue;  // for other programs; nothing here reads it
    const std::string whole = read_file(path(name));
    for (int i = 0; i < 40; ++i, ++flips) {
      std::string changed = whole;
      const std::size_t at = i < 10 ? static_cast<std::size_t>(i) * 7 % whole.size() : random() % whole.size();
      changed[at] = static_cast<char>(changed[at] ^ (1 << random() % 8));
      std::ofstream(path(name), std::ios::binary) << changed;
      EXPECT_NE(refusal().find(name), std::string::npos) << name << " at " << at << ": " << refusal();
    }
    std::ofstream(path(name), std::ios::binary) << whole;
  }
  EXPECT_EQ(refusal(), "");
  std::printf("%d flips, all refused\n", flips);
}

TEST_F(Damaged, InATensorNamesFileTensorAndOffset) {
  const Checkpoint checkpoint(folder_);
  const SavedTensor* tensor = checkpoint.find("master", "block.weight");
  const std::string name = checkpoint.manifest().files[tensor->file].name;
  std::string bytes = read_file(path(name));
  bytes[static_cast<std::size_t>(tensor->at) + 5000] ^= 1;
  std::ofstream(path(name), std::ios::binary) << bytes;
  EXPECT_EQ(refusal(),
            path(name) + ": master 'block.weight' was changed since it was written, within the 4096 bytes at " +
                std::to_string(tensor->at + 4096) + "; load another checkpoint (zeroth verify says which are whole)");
}

TEST_F(Damaged, ByTruncationOrLossIsRefused) {
  for (const std::string& name : files()) {
    if (name == kIndex) continue;
    const std::string whole = read_file(path(name));
    for (const std::size_t left : {std::size_t{0}, std::size_t{1}, std::size_t{4096}, whole.size() - 1}) {
      if (left >= whole.size()) continue;
      std::ofstream(path(name), std::ios::binary) << whole.substr(0, left);
      EXPECT_NE(refusal().find(name), std::string::npos) << name << " of " << left << " bytes: " << refusal();
    }
    fs::remove(path(name));
    EXPECT_NE(refusal().find(name), std::string::npos) << name << " lost: " << refusal();
    std::ofstream(path(name), std::ios::binary) << whole;
  }
}

TEST_F(Damaged, ByAFileOfAnotherStepIsRefusedNamingBoth) {
  save(root_, image_of(model_, 2, 0, 1), alone(), kSmall);
  const std::string name = "master-00001-of-00003.safetensors";
  ASSERT_TRUE(fs::exists(path(name)));
  fs::copy_file(fs::path(root_) / checkpoint_name(2) / name, path(name), fs::copy_options::overwrite_existing);
  EXPECT_NE(refusal().find(name + ": is of step 2 of run job, its checkpoint of step 1 of run job"), std::string::npos)
      << refusal();
}

TEST_F(Damaged, ByAHostileManifestIsRefused) {
  const Manifest whole = Checkpoint(folder_).manifest();
  const auto refused = [&](const std::function<void(Manifest&)>& change, const std::string& text) {
    Manifest manifest = whole;
    change(manifest);
    std::ofstream(path(kManifest), std::ios::binary) << to_text(manifest);
    EXPECT_NE(refusal().find(text), std::string::npos) << refusal();
  };
  refused([](Manifest& m) { m.files[0].name = "../../secret.safetensors"; }, "is not the name of a file of its folder");
  refused([](Manifest& m) { m.files[0].name = "/etc/passwd"; }, "is not the name of a file of its folder");
  refused([](Manifest& m) { m.tensors[0].at = m.tensors[1].at; }, "");
  refused([](Manifest& m) { m.tensors[0].at = int64_t{1} << 62; }, "lies outside");
  refused([](Manifest& m) { m.tensors[0].at = -8; }, "lies outside");
  refused([](Manifest& m) { m.tensors[0].shape = {int64_t{1} << 40, int64_t{1} << 40}; }, "no type or shape");
  refused([](Manifest& m) { m.tensors[0].shape = {-1}; }, "no type or shape");
  refused([](Manifest& m) { m.tensors[0].file = 999; }, "in a file that is not listed");
  refused([](Manifest& m) { m.tensors[0].chunks.pop_back(); }, "are not all of it");
  refused([](Manifest& m) { m.tensors[0].chunks[0].bytes = int64_t{1} << 50; }, "are not all of it");
  refused([](Manifest& m) { m.tensors.push_back(m.tensors[0]); }, "is listed twice");
  refused(
      [](Manifest& m) {
        m.tensors.push_back(m.tensors[0]);
        m.tensors.back().name = "other";
      },
      "stands where another tensor does");
}

TEST(SafetensorsHeaders, ThatLieAreRefused) {
  const auto refused = [](const std::string& text, int64_t bytes, const std::string& why) {
    try {
      parse_header("f", text, 8, bytes);
      ADD_FAILURE() << text << " is taken";
    } catch (const Failure& failure) {
      EXPECT_NE(std::string(failure.what()).find(why), std::string::npos) << failure.what();
    }
  };
  refused("[]", 8, "no JSON object");
  refused("{", 8, "no JSON object");
  refused(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})",
      16, "'a' twice");
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,9]}})", 17, "takes 8 bytes by its shape");
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}})", 16, "takes 8 bytes by its shape");
  refused(
      R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
      20, "'b' begins at 4");
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}})", 24, "'a' begins at 8");
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 15, "its tensors end at byte 16");
  refused(R"({"a":{"dtype":"F77","shape":[2],"data_offsets":[0,8]}})", 16, "not known here");
  refused(R"({"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}})", 16, "shape of 'a' is none");
  refused(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}})", 16, "are no two numbers");
}

}  // namespace
}  // namespace zr::test
