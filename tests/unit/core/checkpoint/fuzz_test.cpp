// A short fuzz run in every build: valid texts with some bytes changed, removed, duplicated or swapped.
#include <random>

#include "fuzz_target.hpp"
#include "ranks.hpp"
#include "support/scratch.hpp"

namespace zr::test {
namespace {

std::string changed(std::string text, std::mt19937& random) {
  static const std::vector<std::string> kPieces{"-1",
                                                "9223372036854775807",
                                                "18446744073709551616",
                                                "1e400",
                                                "null",
                                                "[]",
                                                "{}",
                                                "\"\"",
                                                "../",
                                                "\"shape\":[4294967296,4294967296]"};
  for (unsigned n = 1 + random() % 3; n > 0 && !text.empty(); --n) {
    const std::size_t at = random() % text.size(), length = random() % std::min<std::size_t>(20, text.size() - at) + 1;
    switch (random() % 5) {
      case 0: text[at] = static_cast<char>(random()); break;
      case 1: text.erase(at, length); break;
      case 2: text.insert(random() % text.size(), text.substr(at, length)); break;
      case 3: text.replace(at, length, kPieces[random() % kPieces.size()]); break;
      default: text[at] = "0123456789\",:[]{}"[random() % 17];
    }
  }
  return text;
}

TEST(CheckpointParsersTest, AcceptValidAndRejectChangedText) {
  const Scratch scratch;
  save(scratch.path("c"), image_of(Model(3), 1, 0, 1), checkpoint::single_rank_comm(), kSmall);
  const std::string folder = checkpoint::find_checkpoint(scratch.path("c"));
  const std::string manifest = read_file(folder + "/" + checkpoint::kManifest),
                    index = read_file(folder + "/" + checkpoint::kIndex);
  const std::string body = manifest.substr(manifest.find("\"manifest\":") + 11);
  const std::string header =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,100],"data_offsets":[0,800]},)"
      R"("b":{"dtype":"BF16","shape":[96],"data_offsets":[800,992]}})";
  const std::vector<std::pair<Fed, std::string>> seeds{{Fed::manifest, manifest},
                                                       {Fed::manifest_with_its_hash, body.substr(0, body.size() - 2)},
                                                       {Fed::header, header + std::string(8, ' ')},
                                                       {Fed::index, index}};
  std::mt19937 random(11);
  int taken = 0, rejected = 0;
  for (const auto& [what, seed] : seeds) {
    EXPECT_TRUE(feed(what, seed)) << static_cast<int>(what);
    for (int i = 0; i < 4000; ++i) (feed(what, changed(seed, random)) ? taken : rejected) += 1;
  }
  std::printf("%d changed texts rejected, %d accepted (the changed bytes have no meaning)\n", rejected, taken);
  EXPECT_GT(rejected, 8000);
}

}  // namespace
}  // namespace zr::test
