// The contract of tiers, tested for each tier.
#include <atomic>

#include "support/offload_rig.hpp"

namespace zr::test {
namespace {

struct MemoryKind {
  const char* name;
  std::string id;
  std::vector<std::string> values;
  int folders;  // folders that the tier stripes over
  friend void PrintTo(const MemoryKind& kind, std::ostream* out) { *out << kind.name; }
};

class TiersTest : public ::testing::TestWithParam<MemoryKind> {
 protected:
  Tier open(std::vector<std::string> more = {}) const {
    std::vector<std::string> values = GetParam().values;
    std::string paths;
    for (int i = 0; i < GetParam().folders; ++i) {
      std::filesystem::create_directories(scratch_.path(std::to_string(i)));
      paths += (i ? ":" : "") + scratch_.path(std::to_string(i));
    }
    if (!paths.empty()) more.push_back("path=\"" + paths + "\"");
    values.insert(values.end(), more.begin(), more.end());
    return Tier(GetParam().id, values);
  }
  bool on_disk() const { return GetParam().folders > 0; }
  Scratch scratch_;
};

TEST_P(TiersTest, ReturnRandomRangesAsLastWritten) {
  const Tier tier = open();
  std::mt19937 random(7);
  const std::size_t align = tier.caps().io_align;
  const auto rounded = [&](std::size_t n) { return std::max(align, zr::round_up(n, align)); };
  std::vector<uint64_t> slots;
  std::vector<Pages> truth;
  for (const std::size_t bytes : {1u, 4096u, 70001u, 1u << 20, 3000003u}) {
    slots.push_back(tier.reserve(bytes));
    truth.emplace_back(rounded(bytes));
    truth.back().fill(static_cast<unsigned>(bytes));
    ASSERT_EQ(tier.write({part_of(slots.back(), 0, truth.back(), 0, truth.back().size())}).text, "");
  }
  for (int i = 0; i < 300; ++i) {
    const std::size_t s = random() % slots.size(), size = truth[s].size();
    const std::size_t at = random() % size / align * align, bytes = rounded(random() % (size - at));
    if (random() % 2) {
      const Pages news = filled(bytes, static_cast<unsigned>(i));
      const std::vector<zr_transfer> one{part_of(slots[s], at, news, 0, bytes)};
      EXPECT_GOOD(random() % 2 ? tier.write(one) : tier.wait(tier.begin_write(one)));
      std::memcpy(truth[s].data() + at, news.data(), bytes);
    } else {
      const Pages got(bytes);
      const std::vector<zr_transfer> one{part_of(slots[s], at, got, 0, bytes)};
      EXPECT_GOOD(random() % 2 ? tier.read(one) : tier.wait(tier.begin_read(one)));
      ASSERT_EQ(std::memcmp(got.data(), truth[s].data() + at, bytes), 0) << "slot " << s << " at " << at;
    }
  }
  for (std::size_t s = 0; s < slots.size(); ++s) {
    const Pages got(truth[s].size());
    EXPECT_GOOD(tier.read({full_transfer(slots[s], got)}));
    EXPECT_TRUE(got == truth[s]) << "slot " << s;
    tier.release(slots[s]);
  }
}

TEST_P(TiersTest, ResolveOneCompletionWhenAllItsTransfersEnd) {
  const Tier tier = open();
  const std::size_t bytes = 8192;
  const Pages all = filled(200 * bytes, 3), got(200 * bytes);
  const uint64_t one = tier.reserve(100 * bytes), other = tier.reserve(100 * bytes);
  std::vector<zr_transfer> out, in;
  for (std::size_t i = 0; i < 200; ++i) {
    out.push_back(part_of(i % 2 ? one : other, i / 2 * bytes, all, i * bytes, bytes));
    in.push_back(part_of(i % 2 ? one : other, i / 2 * bytes, got, i * bytes, bytes));
  }
  EXPECT_GOOD(tier.wait(tier.begin_write(out)));
  EXPECT_GOOD(tier.wait(tier.begin_read(in)));
  EXPECT_TRUE(got == all);
  EXPECT_GOOD(tier.wait(tier.begin_write({})));
  EXPECT_GOOD(tier.read({}));
}

TEST_P(TiersTest, ServeSeveralThreadsWithManyCompletionsEach) {
  const Tier tier = open();
  constexpr std::size_t kBytes = 65536, kCount = 40;
  std::vector<uint64_t> slots;
  for (int i = 0; i < 4; ++i) slots.push_back(tier.reserve(kBytes * kCount));
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (unsigned t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      const Pages all = filled(kBytes * kCount, t), got(kBytes * kCount);
      std::vector<zr_done*> dones;
      for (std::size_t i = 0; i < kCount; ++i)
        dones.push_back(tier.begin_write({part_of(slots[t], i * kBytes, all, i * kBytes, kBytes)}));
      for (zr_done* done : dones) wrong += tier.wait(done).code != ZR_OK;
      dones.clear();
      for (std::size_t i = 0; i < kCount; ++i)
        dones.push_back(tier.begin_read({part_of(slots[t], i * kBytes, got, i * kBytes, kBytes)}));
      for (zr_done* done : dones) wrong += tier.wait(done).code != ZR_OK;
      wrong += !(got == all);
    });
  for (std::thread& one : threads) one.join();
  EXPECT_EQ(wrong, 0);
}

TEST_P(TiersTest, RejectTransfersOutsideTheirAllocations) {
  const Tier tier = open();
  const std::string who = "tier " + GetParam().id + ": transfer ";
  const Pages memory(16384);
  const uint64_t slot = tier.reserve(8192);
  const auto text = [&](const zr_transfer& one) {
    const Answer answer = tier.write({full_transfer(slot, Pages(4096)), one});
    EXPECT_EQ(answer.code, ZR_INVALID);
    EXPECT_EQ(answer.native, 1);
    return answer.text;
  };
  EXPECT_EQ(text(full_transfer(999, memory)), who + "1 refers to allocation 999, which is not reserved");
  EXPECT_EQ(text(full_transfer(slot, memory)), who + "1 (16384 bytes at byte 0) exceeds its allocation of 8192 bytes");
  EXPECT_EQ(text(part_of(slot, ~uint64_t{4095}, memory, 0, 4096)),
            who + "1 (4096 bytes at byte 18446744073709547520) exceeds its allocation of 8192 bytes");
  zr_transfer other = part_of(slot, 0, memory, 0, 4096);
  other.memory.device = {2, 0};
  EXPECT_EQ(text(other), who + "1 must be a view of bytes in CPU memory");
  if (!on_disk()) return;
  const std::string rule =
      "): offset, length and address must be multiples of 4096; round up, allocations have space for it";
  EXPECT_EQ(text(part_of(slot, 512, memory, 0, 4096)), who + "1 (4096 bytes at byte 512" + rule);
  EXPECT_EQ(text(part_of(slot, 0, memory, 0, 4095)), who + "1 (4095 bytes at byte 0" + rule);
  EXPECT_EQ(text(part_of(slot, 0, memory, 64, 4096)), who + "1 (4096 bytes at byte 0, at an unaligned address" + rule);
}

TEST_P(TiersTest, FinishTransfersBeforeDestruction) {
  const Pages all = filled(8 << 20, 5);
  std::vector<zr_done*> dones;
  const zr_async_service* async = nullptr;
  {
    const Tier tier = open();
    async = &tier.async();
    const uint64_t slot = tier.reserve(all.size());
    for (std::size_t at = 0; at < all.size(); at += 1 << 20)
      dones.push_back(tier.begin_write({part_of(slot, at, all, at, 1 << 20)}));
  }
  for (zr_done* done : dones) {
    host::CallError error;
    EXPECT_EQ(async->done_poll(done, &error), ZR_OK) << error.msg;
    async->done_release(done);
  }
}

TEST_P(TiersTest, QueueAThousandTransfers) {
  if (!on_disk()) GTEST_SKIP() << "the memory tier has no queue";
  const Tier tier = open({"depth=1"});
  EXPECT_EQ(tier.caps().io_depth, 1u);
  constexpr std::size_t kBytes = 4096, kCount = 1000;
  const Pages all = filled(kBytes * kCount, 9), got(kBytes * kCount);
  const uint64_t slot = tier.reserve(all.size());
  std::vector<zr_done*> dones;
  for (std::size_t i = 0; i < kCount; ++i)
    dones.push_back(tier.begin_write({part_of(slot, i * kBytes, all, i * kBytes, kBytes)}));
  for (zr_done* done : dones) EXPECT_GOOD(tier.wait(done));
  dones.clear();
  for (std::size_t i = 0; i < kCount; ++i)
    dones.push_back(tier.begin_read({part_of(slot, i * kBytes, got, i * kBytes, kBytes)}));
  for (zr_done* done : dones) EXPECT_GOOD(tier.wait(done));
  EXPECT_TRUE(got == all);
}

TEST_P(TiersTest, ReuseReleasedSpace) {
  if (!on_disk()) GTEST_SKIP() << "the memory tier returns memory to the kernel";
  const Tier tier = open();
  const uint64_t one = tier.reserve(16 << 20), before = tier.caps().capacity;
  uint64_t slot = one;
  for (int i = 0; i < 50; ++i) {
    tier.release(slot);
    slot = tier.reserve(static_cast<uint64_t>(16 - i % 3) << 20);
  }
  const auto moved = static_cast<int64_t>(tier.caps().capacity) - static_cast<int64_t>(before);
  EXPECT_LT(std::abs(moved), int64_t{200} << 20) << "fifty slots of 16 MiB at a time would take 800";
}

// The values of the machine profile for a path: none for "/unknown", invalid ones for "/odd".
zr_code measured(const zr_host*, const char* path, uint64_t* block_bytes, uint32_t* depth) {
  const std::string folder = std::filesystem::path(path).filename().string();
  if (folder == "unknown") return ZR_UNSUPPORTED;
  *block_bytes = folder == "odd" ? 4097 : 4 << 20;
  *depth = 16;
  return ZR_OK;
}

TEST(NvmeTransfersTest, UseKeysThenTheMachineProfileThenDefaults) {
  constexpr zr_machine_service kMachine{sizeof(zr_machine_service), 0, measured};
  const Scratch scratch;
  using Size = std::pair<uint64_t, uint64_t>;
  const auto size = [&](const std::string& folder, const zr_machine_service* machine, std::vector<std::string> keys) {
    std::filesystem::create_directories(scratch.folder() / folder);
    keys.push_back("path=\"" + scratch.path(folder) + "\"");
    ::testing::internal::CaptureStderr();
    const zr_offload_caps caps = Tier("nvme", keys, kPlugins, "job-1", machine).caps();
    const std::string said = ::testing::internal::GetCapturedStderr();
    const bool all_given = keys.size() == 3;
    EXPECT_EQ(said.find("`zeroth tune` measured for " + scratch.path(folder)) != said.npos,
              machine && folder == "known" && !all_given)
        << said;
    return Size{caps.io_bytes, caps.io_depth};
  };
  EXPECT_EQ(size("known", nullptr, {}), Size(1 << 20, 8));
  EXPECT_EQ(size("unknown", &kMachine, {}), Size(1 << 20, 8));
  EXPECT_EQ(size("odd", &kMachine, {}), Size(1 << 20, 8));
  EXPECT_EQ(size("known", &kMachine, {}), Size(4 << 20, 16));
  EXPECT_EQ(size("known", &kMachine, {"depth=2"}), Size(4 << 20, 2));
  EXPECT_EQ(size("known", &kMachine, {"block_bytes=64KiB"}), Size(64 << 10, 16));
  EXPECT_EQ(size("known", &kMachine, {"block_bytes=64KiB", "depth=2"}), Size(64 << 10, 2));
}

std::string pin_of(const std::string& name) { return name + "=\"false\""; }
INSTANTIATE_TEST_SUITE_P(
    All, TiersTest,
    ::testing::Values(MemoryKind{"cpu", "cpu", {pin_of("pin")}, 0}, MemoryKind{"uring", "nvme", {"engine=uring"}, 1},
                      MemoryKind{"threads", "nvme", {"engine=threads"}, 1},
                      MemoryKind{"uring_striped", "nvme", {"engine=uring", "block_bytes=64KiB"}, 3},
                      MemoryKind{"threads_striped", "nvme", {"engine=threads", "block_bytes=4KiB", "depth=3"}, 2},
                      MemoryKind{"uring_buffered", "nvme", {"engine=uring", "direct=\"false\""}, 1},
                      MemoryKind{
                          "threads_unchecked", "nvme", {"engine=threads", "checksum=false", "direct=\"false\""}, 1}),
    [](const auto& kind) { return kind.param.name; });

}  // namespace
}  // namespace zr::test
