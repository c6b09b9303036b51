// Disks that fail, return wrong data, are slow or full: uses the build of the tier with fault injection.
#include <chrono>

#include "support/offload_rig.hpp"

namespace zr::test {
namespace {

class NvmeFaultTest : public ::testing::TestWithParam<const char*> {
 protected:
  ~NvmeFaultTest() override { ::unsetenv("ZR_TIER_FAULT"); }
  Tier open(const std::string& fault, std::vector<std::string> more = {}) const {
    ::setenv("ZR_TIER_FAULT", fault.c_str(), 1);
    more.push_back(std::string("engine=") + GetParam());
    more.push_back("path=\"" + scratch_.folder().string() + "\"");
    return Tier("nvme", more, kFailing);
  }
  std::string file() const { return "tier nvme: " + scratch_.folder().string() + " (unnamed file): "; }
  Scratch scratch_;
};

TEST_P(NvmeFaultTest, CompletesShortTransfers) {
  for (const std::string fault : {"read=SHORT", "write=SHORT", "read=SHORT@3,write=SHORT@2"}) {
    const Tier tier = open(fault);
    const Pages in = filled(5 * kMiB, 1), out(5 * kMiB);
    const uint64_t slot = tier.reserve(in.size());
    EXPECT_GOOD(tier.write({full_transfer(slot, in)}));
    EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
    EXPECT_TRUE(in == out) << fault;
  }
}

TEST_P(NvmeFaultTest, NamesFileOffsetCauseAndRemedy) {
  const Tier tier = open("read=EIO@3,write=EIO@6", {"depth=1"});
  const Pages in = filled(8 * kMiB, 1), out(8 * kMiB);
  const uint64_t slot = tier.reserve(8 * kMiB);
  const auto parts = [&](const Pages& memory) {
    std::vector<zr_transfer> all;
    for (std::size_t i = 0; i < 4; ++i) all.push_back(part_of(slot, 2 * i * kMiB, memory, 2 * i * kMiB, 2 * kMiB));
    return all;
  };
  const Answer write = tier.wait(tier.begin_write(parts(in)));
  EXPECT_EQ(write.code, ZR_IO);
  EXPECT_EQ(write.native, 2) << "the sixth MiB belongs to the third transfer";
  EXPECT_EQ(write.text,
            file() +
                "writing 1048576 bytes at byte 5242880 failed: Input/output error; the disk may be failing; "
                "set offload.nvme.path to a folder on another disk");
  EXPECT_GOOD(tier.wait(tier.begin_write(parts(in))));
  const Answer read = tier.read(parts(out));
  EXPECT_EQ(read.code, ZR_IO);
  EXPECT_EQ(read.native, 1);
  EXPECT_EQ(read.text, file() +
                           "reading 1048576 bytes at byte 2097152 failed: Input/output error; the disk may be failing; "
                           "set offload.nvme.path to a folder on another disk");
  EXPECT_GOOD(tier.read(parts(out)));
  EXPECT_TRUE(in == out) << "a failure affects only its own request";
}

TEST_P(NvmeFaultTest, FailsOnlyTheAffectedRequest) {
  const Tier tier = open("write=EIO@20");
  const Pages in = filled(32 * kMiB, 1);
  const uint64_t slot = tier.reserve(in.size());
  std::vector<zr_done*> dones;
  for (std::size_t i = 0; i < 8; ++i)
    dones.push_back(tier.begin_write({part_of(slot, 4 * i * kMiB, in, 4 * i * kMiB, 4 * kMiB)}));
  int failed = 0;
  for (zr_done* done : dones) failed += tier.wait(done).code == ZR_IO;
  EXPECT_EQ(failed, 1);
}

TEST_P(NvmeFaultTest, ReportsADiskThatBecomesFullDuringAWrite) {
  const Tier tier = open("write=ENOSPC@1");
  const Answer answer = tier.write({full_transfer(tier.reserve(kMiB), Pages(kMiB))});
  EXPECT_EQ(answer.code, ZR_IO);
  EXPECT_EQ(answer.text, file() +
                             "writing 1048576 bytes at byte 0 failed: No space left on device; free disk space there, "
                             "or set offload.nvme.path to a larger disk");
}

TEST_P(NvmeFaultTest, DetectsAFlippedBit) {
  const Tier tier = open("flip@2", {"depth=1"});
  const Pages in = filled(3 * kMiB, 1), out(3 * kMiB);
  const uint64_t slot = tier.reserve(in.size());
  EXPECT_GOOD(tier.write({full_transfer(slot, in)}));
  const Answer answer = tier.wait(tier.begin_read({part_of(slot, 0, out, 0, 4096), full_transfer(slot, out)}));
  EXPECT_EQ(answer.code, ZR_IO);
  EXPECT_EQ(answer.native, 1);
  EXPECT_EQ(answer.text, file() +
                             "reading 4096 bytes at byte 1048576 returned other data than was written; the disk "
                             "may be failing; set offload.nvme.path to a folder on another disk");
  EXPECT_GOOD(tier.read({part_of(slot, 2 * kMiB, out, 0, kMiB)}));
  EXPECT_GOOD(tier.write({full_transfer(slot, in)}));
  EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
  EXPECT_TRUE(in == out);
}

TEST_P(NvmeFaultTest, DoesNotDetectAFlippedBitWithoutChecksums) {
  const Tier tier = open("flip@1", {"checksum=false"});
  const Pages in = filled(kMiB, 1), out(kMiB);
  const uint64_t slot = tier.reserve(in.size());
  EXPECT_TRUE(tier.ledger.holders().empty());
  EXPECT_GOOD(tier.write({full_transfer(slot, in)}));
  EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
  EXPECT_EQ(out.data()[0] ^ in.data()[0], 1);
  EXPECT_EQ(std::memcmp(out.data() + 1, in.data() + 1, kMiB - 1), 0);
}

TEST_P(NvmeFaultTest, SlowDiskDelaysOnlyCallersThatWait) {
  using Clock = std::chrono::steady_clock;
  const Tier tier = open("slow=2000ms");
  const Pages in = filled(kMiB, 1), out(kMiB);
  const uint64_t slot = tier.reserve(in.size());
  const auto begin = Clock::now();
  zr_done* done = tier.begin_write({full_transfer(slot, in)});
  EXPECT_FALSE(tier.ready(done));
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(2000));
  EXPECT_GOOD(tier.wait(done));
  EXPECT_GE(Clock::now() - begin, std::chrono::milliseconds(2000));
  EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
  EXPECT_TRUE(in == out);
}

INSTANTIATE_TEST_SUITE_P(With, NvmeFaultTest, ::testing::Values("uring", "threads"),
                         [](const auto& engine) { return engine.param; });

TEST(NvmeTierTest, CountsChecksumMemoryWhileASlotIsReserved) {
  const Scratch scratch;
  const Tier tier("nvme", {"path=\"" + scratch.folder().string() + "\""});
  const uint64_t slot = tier.reserve(10 * kMiB + 1), other = tier.reserve(4096);
  EXPECT_EQ(tier.ledger.holders(),
            (std::vector<std::pair<std::string, int64_t>>{{"other: checksums of nvme", (2561 + 1) * 4}}));
  tier.release(slot);
  EXPECT_EQ(tier.ledger.holders()[0].second, 4);
  tier.release(other);
  EXPECT_TRUE(tier.ledger.holders().empty());
}

TEST(NvmeTierTest, ReportsItsCapabilities) {
  const Scratch scratch;
  const Tier tier("nvme", {"path=\"" + scratch.folder().string() + "\"", "block_bytes=256KiB", "depth=5"});
  const zr_offload_caps caps = tier.caps();
  EXPECT_EQ(caps.flags, static_cast<uint32_t>(ZR_TIER_ASYNC));
  EXPECT_EQ(caps.io_align, 4096u);
  EXPECT_EQ(caps.io_bytes, uint64_t{256} << 10);
  EXPECT_EQ(caps.io_depth, 5u);
  EXPECT_EQ(caps.device_types, 2u);
  const auto free = std::filesystem::space(scratch.folder()).available;
  EXPECT_LT(std::abs(static_cast<double>(caps.capacity) / static_cast<double>(free) - 1), 0.2);
  EXPECT_EQ(tier.api().map, nullptr);
}

std::string refusal(const std::vector<std::string>& values, const std::string& folder = kPlugins) {
  try {
    const Tier tier("nvme", values, folder);
  } catch (const Error& failure) {
    return failure.what();
  }
  return "the tier was created";
}

TEST(NvmeTierTest, RejectsInvalidSettings) {
  const Scratch scratch;
  const std::string file = scratch.write("file", "x"), path = "path=\"" + scratch.folder().string() + "\"";
  EXPECT_NE(refusal({"path=\"" + scratch.path("none") + "\""})
                .find("tier nvme: cannot access " + scratch.path("none") +
                      ": No such file or directory; set offload.nvme.path to a "
                      "folder on a disk that this user may write to"),
            std::string::npos);
  EXPECT_NE(refusal({"path=\"" + file + "\""}).find(file + " is not a folder"), std::string::npos);
  EXPECT_NE(refusal({"path=\"/tmp::/tmp\""}).find("has an empty folder; write \"/a:/b\""), std::string::npos);
  const std::string good = scratch.folder().string();
  EXPECT_NE(
      refusal({"path=\"" + good + ":" + good + "/none\""})
          .find("offload.nvme.path names 2 folders, because ':' separates them, and '" + good +
                "/none' does not exist; create it, correct the path, or give a folder with ':' in its name another "
                "one, such as a symbolic link"),
      std::string::npos);
  EXPECT_NE(refusal({path, "block_bytes=5000"}).find("block_bytes = 5000 is not a multiple of 4096"),
            std::string::npos);
  EXPECT_NE(refusal({}).find("path"), std::string::npos);
  ::setenv("ZR_TIER_FAULT", "uring=EPERM", 1);
  EXPECT_NE(refusal({path, "engine=uring"}, kFailing).find("cannot use io_uring: Operation not permitted; permit it "),
            std::string::npos);
  EXPECT_EQ(refusal({path, "engine=auto"}, kFailing), "the tier was created");
  ::unsetenv("ZR_TIER_FAULT");
}

// Runs in a separate mount namespace.
TEST(NvmeTierTest, ReportsATooSmallDiskOnReserve) {
  const Scratch scratch;
  const int code = in_child([&] {
    if (!own_disk(scratch.folder().string(), "size=8m")) ::_exit(77);
    const Tier tier("nvme", {"path=\"" + scratch.folder().string() + "\""});
    EXPECT_EQ(tier.caps().capacity, 8 * kMiB);
    const uint64_t slot = tier.reserve(5 * kMiB);
    const Answer answer = tier.reserve_fails(5 * kMiB);
    EXPECT_EQ(answer.code, ZR_IO);
    EXPECT_EQ(answer.native, ENOSPC);
    EXPECT_EQ(answer.text, "tier nvme: cannot reserve 5242880 bytes in " + scratch.folder().string() +
                               ", 3145728 bytes are free: No space left on device; free "
                               "disk space there, or set offload.nvme.path to a larger disk");
    const uint64_t small = tier.reserve(3 * kMiB);  // the rejected reservation takes no space
    const Pages in = filled(3 * kMiB, 1), out(3 * kMiB);
    EXPECT_GOOD(tier.write({full_transfer(small, in)}));
    EXPECT_GOOD(tier.read({full_transfer(small, out)}));
    EXPECT_TRUE(in == out);
    tier.release(slot);
    tier.release(small);
    tier.reserve(8 * kMiB);
  });
  if (code == 77) GTEST_SKIP() << "this machine does not allow mount namespaces";
  EXPECT_EQ(code, 0);
}

}  // namespace
}  // namespace zr::test
