// The checksums of the records of zip archives.
#include "checkpoint/zip_checksums.hpp"

#include <gtest/gtest.h>

#include <fstream>
#include <iterator>

#include "support/said_by.hpp"
#include "support/scratch.hpp"

namespace zr::host {
namespace {

using test::said_by;

const std::string kArchive = ZR_SOURCE_DIR "/tests/multirank/engine/state_dicts/state_dict.pt";

std::map<std::string, uint32_t> checksums_of(const std::string& path) {
  return checkpoint::zip_checksums(File(path, File::Mode::read));
}

TEST(ZipChecksumsTest, ListsTheChecksumOfEveryRecord) {
  const std::map<std::string, uint32_t> checksums = checksums_of(kArchive);
  EXPECT_EQ(checksums.size(), 13u);
  EXPECT_EQ(checksums.at("state_dict/data.pkl"), 0x6056adf5u);
  EXPECT_EQ(checksums.at("state_dict/data/0"), 0xf1e011e1u);
  EXPECT_EQ(checksums.at("state_dict/byteorder"), checkpoint::crc32_of("little", 6));
}

TEST(ZipChecksumsTest, ComputesTheChecksumOfZipArchives) {
  EXPECT_EQ(checkpoint::crc32_of("", 0), 0u);
  EXPECT_EQ(checkpoint::crc32_of("123456789", 9), 0xcbf43926u);
}

// Whatever the archive is cut to, or one byte of its directory is changed to, the result is a list or an error that
// names the file.
TEST(ZipChecksumsTest, ReportsADamagedDirectory) {
  const test::Scratch scratch;
  std::ifstream in(kArchive, std::ios::binary);
  const std::string intact{std::istreambuf_iterator<char>(in), {}}, path = scratch.path("a.pt");
  const std::string damaged = path + ": is damaged: the list of its records cannot be read; save or download it again";
  const auto error_of = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    return said_by([&] { checksums_of(path); });
  };
  EXPECT_EQ(error_of(intact), "nothing");
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{21}, intact.size() / 2, intact.size() - 1})
    EXPECT_EQ(error_of(intact.substr(0, size)), damaged) << size;
  for (std::size_t i = intact.find("PK\x01\x02"); i < intact.size(); ++i) {
    std::string changed = intact;
    changed[i] = static_cast<char>(~changed[i]);
    const std::string error = error_of(changed);
    EXPECT_TRUE(error == "nothing" || error == damaged) << i << ": " << error;
  }
}

}  // namespace
}  // namespace zr::host
