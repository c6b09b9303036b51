#include "data.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <stdexcept>

namespace {

using gpt::Text;

class GptDataTest : public testing::Test {
 protected:
  GptDataTest() : folder_(std::filesystem::temp_directory_path() / ("gpt_data_test." + std::to_string(getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~GptDataTest() override { std::filesystem::remove_all(folder_); }

  std::string plain(const std::string& bytes) const {
    const auto file = folder_ / "text";
    std::ofstream(file, std::ios::binary) << bytes;
    return file;
  }
  std::string gzipped(const std::string& bytes) const {
    const auto file = folder_ / "text.gz";
    gzFile out = gzopen(file.c_str(), "wb");
    gzwrite(out, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(out);
    return file;
  }
  static std::string refusal(const std::function<void()>& attempt) {
    try {
      attempt();
    } catch (const std::invalid_argument& e) {
      return e.what();
    }
    return "";
  }

  std::filesystem::path folder_;
};

TEST_F(GptDataTest, RejectsAPathThatIsNotARegularFile) {
  const std::string pipe = folder_ / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  const std::string remedy =
      "\n  remedy: name a plain or .gz file of your own (data.text=FILE); in the source tree, `make setup` fetches the "
      "default text";
  EXPECT_EQ(refusal([] { Text("/dev/zero"); }),
            "data.text: /dev/zero: is a pipe or a device, not a regular file" + remedy);
  EXPECT_EQ(refusal([&] { Text text(pipe); }),
            "data.text: " + pipe + ": is a pipe or a device, not a regular file" + remedy);
  EXPECT_EQ(refusal([&] { Text text(folder_); }),
            "data.text: " + folder_.string() + ": is a folder, not a file" + remedy);
}

// Byte i is i modulo 251, so that a sample shows its position in the text.
std::string counting(size_t n) {
  std::string bytes(n, 0);
  for (size_t i = 0; i < n; ++i) {
    bytes[i] = static_cast<char>(i % 251);
  }
  return bytes;
}

constexpr char kRemedy[] =
    "\n  remedy: name a plain or .gz file of your own (data.text=FILE); in the source tree, `make setup` fetches the "
    "default text";

TEST_F(GptDataTest, ShiftsTargetsByOneByte) {
  const Text text(plain(counting(20000)));
  const auto batch = text.training(1, 2, 3, 4, 16);
  ASSERT_EQ(batch.bytes.sizes(), (std::vector<int64_t>{4, 16}));
  EXPECT_TRUE(batch.next.equal((batch.bytes + 1) % 251));
  const auto held_out = text.validation(0, 16);
  EXPECT_TRUE(held_out.next.equal((held_out.bytes + 1) % 251));
}

TEST_F(GptDataTest, DerivesAMicroBatchFromSeedStepAndIndexAlone) {
  const auto file = plain(counting(20000));
  const Text one(file), other(file);
  other.training(7, 0, 0, 8, 16);  // earlier reads have no influence
  EXPECT_TRUE(one.training(1, 2, 3, 8, 16).bytes.equal(other.training(1, 2, 3, 8, 16).bytes));
  EXPECT_FALSE(one.training(1, 2, 3, 8, 16).bytes.equal(one.training(9, 2, 3, 8, 16).bytes));
  EXPECT_FALSE(one.training(1, 2, 3, 8, 16).bytes.equal(one.training(1, 9, 3, 8, 16).bytes));
  EXPECT_FALSE(one.training(1, 2, 3, 8, 16).bytes.equal(one.training(1, 2, 9, 8, 16).bytes));
}

TEST_F(GptDataTest, NeverTrainsOnTheLastTwentieth) {
  const Text text(plain(std::string(9500, 'a') + std::string(500, 'b')));
  for (int64_t step = 0; step < 300; ++step) {
    const auto batch = text.training(1, step, 0, 32, 64);
    ASSERT_EQ(batch.next.max().item<int64_t>(), 'a');
  }
}

TEST_F(GptDataTest, PlacesAdjacentValidationWindowsInTheLastTwentieth) {
  const std::string bytes = counting(40000);  // 2000 held out: three chunks of 32 windows of 20, and 80 bytes over
  const Text text(plain(bytes));
  ASSERT_EQ(text.validation_chunks(20), 3);
  int64_t at = 38000;
  for (int64_t chunk = 0; chunk < 3; ++chunk) {
    const auto batch = text.validation(chunk, 20);
    for (int64_t i = 0; i < Text::kChunk; ++i, at += 20) {
      ASSERT_EQ(batch.bytes[i][0].item<int64_t>(), at % 251);
    }
  }
}

TEST_F(GptDataTest, GivesTheSameBatchesForAGzippedText) {
  const auto bytes = counting(20000);
  const Text one(plain(bytes)), other(gzipped(bytes));
  EXPECT_EQ(one.size(), other.size());
  EXPECT_TRUE(one.training(1, 2, 3, 8, 16).bytes.equal(other.training(1, 2, 3, 8, 16).bytes));
}

TEST_F(GptDataTest, RejectsAnUnreadableFileWithARemedy) {
  EXPECT_EQ(refusal([] { Text("/no/such/file"); }),
            "data.text: /no/such/file: No such file or directory" + std::string(kRemedy));
  EXPECT_EQ(refusal([&] { Text{folder_.string()}; }),
            "data.text: " + folder_.string() + ": is a folder, not a file" + kRemedy);
  const auto cut = gzipped(counting(20000));
  std::filesystem::resize_file(cut, 100);
  EXPECT_EQ(refusal([&] { Text{cut}; }), "data.text: " + cut + ": its gzip data is damaged or cut off" + kRemedy);
}

TEST_F(GptDataTest, RejectsGzipDataThatGrowsMoreThanTextDoes) {
  const auto bomb = gzipped(std::string(size_t{72} << 20, 'a'));
  EXPECT_EQ(
      refusal([&] { Text{bomb}; }),
      "data.text: " + bomb + ": its gzip data grows to more than 100 times its size, so it is not text" + kRemedy);
}

TEST_F(GptDataTest, RejectsATextTooShortForTheContext) {
  const auto file = plain(std::string(100, 'a'));
  const Text text(file);
  EXPECT_EQ(refusal([&] { text.training(1, 0, 0, 1, 128); }),
            "data.text: " + file + ": holds 100 bytes, too few for model.context = 128" + kRemedy);
  EXPECT_EQ(refusal([&] { text.validation_chunks(16); }),
            "data.text: " + file +
                ": holds 100 bytes; the last twentieth is too small for 32 validation samples of model.context = 16" +
                kRemedy);
}

}  // namespace
