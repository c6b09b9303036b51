// The host-memory tier.
#include "memory.hpp"

#include <fstream>

#include "pin.hpp"
#include "support/offload_rig.hpp"

namespace zr::test {
namespace {

int64_t resident() {
  std::ifstream in("/proc/self/statm");
  int64_t size = 0, pages = 0;
  in >> size >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

TEST(CpuTierTest, PopulatesMemoryOnReserveAndReturnsItOnRelease) {
  const Tier tier("cpu");
  const zr_offload_caps caps = tier.caps();
  EXPECT_EQ(caps.flags, static_cast<uint32_t>(ZR_TIER_MAPPABLE));
  EXPECT_EQ(caps.device_types, 2u);
  EXPECT_EQ(caps.io_align, 1u);
  EXPECT_GT(caps.capacity, uint64_t{64} << 20);
  const int64_t before = resident(), bytes = (200 << 20) + 4097;  // more than one populated piece; not a power of two
  const uint64_t slot = tier.reserve(static_cast<uint64_t>(bytes));
  EXPECT_GE(resident() - before, bytes);
  EXPECT_LT(resident() - before, bytes + (4 << 20)) << "no more than requested";
  tier.release(slot);
  EXPECT_LT(resident() - before, 4 << 20);
}

TEST(CpuTierTest, IsUsedInPlace) {
  const Tier tier("cpu");
  const uint64_t slot = tier.reserve(10000);
  zr_view view{};
  host::CallError error;
  ASSERT_EQ(tier.api().map(tier.self(), slot, &view, &error), ZR_OK);
  EXPECT_EQ(view.count, 10000);
  EXPECT_EQ(view.dtype, ZR_U8);
  const Pages in = filled(10000, 1), out(10000);
  EXPECT_GOOD(tier.write({part_of(slot, 3, in, 3, 9000)}));
  EXPECT_EQ(std::memcmp(static_cast<char*>(view.data) + 3, in.data() + 3, 9000), 0);
  std::memcpy(view.data, in.data(), 10000);
  EXPECT_GOOD(tier.read({full_transfer(slot, out)}));
  EXPECT_TRUE(in == out);
  tier.api().unmap(tier.self(), slot);
  EXPECT_EQ(tier.api().map(tier.self(), 99, &view, &error), ZR_INVALID);
}

TEST(CpuTierTest, CopiesLargeRangesBetweenAnyAddresses) {
  const Tier tier("cpu");
  constexpr std::size_t kBytes = (9 << 20) + 77;
  const uint64_t slot = tier.reserve(kBytes);
  const Pages in = filled(kBytes, 2), out(kBytes);
  for (const std::size_t odd : {0u, 1u, 15u, 63u}) {
    EXPECT_GOOD(tier.write({part_of(slot, odd, in, 2 * odd, kBytes - 2 * odd)}));
    EXPECT_GOOD(tier.read({part_of(slot, odd, out, 3, kBytes - 2 * odd - 3)}));
    EXPECT_EQ(std::memcmp(out.data() + 3, in.data() + 2 * odd, kBytes - 2 * odd - 3), 0) << odd;
  }
}

TEST(CpuTierTest, ReportsRequiredAndAvailableBytes) {
  const Tier tier("cpu");
  const Answer answer = tier.reserve_fails(uint64_t{1} << 45);
  EXPECT_EQ(answer.code, ZR_NOMEM);
  EXPECT_EQ(answer.text.find("tier cpu: cannot allocate 35184372088832 bytes for 'masters': "), 0u) << answer.text;
  EXPECT_NE(answer.text.find(" bytes are available ("), std::string::npos) << answer.text;
  EXPECT_NE(answer.text.find("; offload less, run fewer ranks on this node, or offload to a disk"), std::string::npos);
}

TEST(CpuTierTest, IsNotPinnedWithoutADevice) {
  if (cpu::has_nvidia_device()) GTEST_SKIP() << "this machine has a device";
  EXPECT_NO_THROW(Tier("cpu", {"pin=\"auto\""}));
  try {
    const Tier tier("cpu", {"pin=\"true\""});
    FAIL() << "the tier was created";
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit_code::environment);
    EXPECT_NE(
        std::string(failure.what())
            .find("offload.cpu.pin = \"true\", but this machine has no CUDA device (no /dev/nvidia<number> exists); "
                  "set \"auto\" or \"false\""),
        std::string::npos)
        << failure.what();
  }
}

TEST(CpuTierTest, FindsDevicesOfAnyNumber) {
  const Scratch dev;
  const std::string folder = dev.folder().string();
  EXPECT_FALSE(cpu::has_nvidia_device(folder.c_str()));
  for (const char* const name : {"nvidiactl", "nvidia-uvm", "nvidia-caps"}) dev.write(name, "");
  EXPECT_FALSE(cpu::has_nvidia_device(folder.c_str()));
  dev.write("nvidia13", "");
  EXPECT_TRUE(cpu::has_nvidia_device(folder.c_str()));
}

// Uses a copy of the kernel's folders.
TEST(CpuTierTest, RespectsTheSmallestLimitOfMachineAndControlGroups) {
  const Scratch root;
  const auto available = [&] { return cpu::available_memory(root.folder().string()); };
  EXPECT_EQ(available().bytes, -1);
  root.write("proc/meminfo", "MemTotal: 100 kB\nMemAvailable:   50 kB\n");
  EXPECT_EQ(available().bytes, 50 * 1024);
  EXPECT_EQ(available().source, "MemAvailable of /proc/meminfo");
  root.write("proc/self/cgroup", "9:cpu,memory:/jobs/one\n0::/slice/unit\n");
  root.write("sys/fs/cgroup/slice/unit/memory.max", "max\n");
  root.write("sys/fs/cgroup/slice/unit/memory.current", "10\n");
  EXPECT_EQ(available().bytes, 50 * 1024) << "a group without a limit has no effect";
  root.write("sys/fs/cgroup/slice/memory.max", "20000\n");
  root.write("sys/fs/cgroup/slice/memory.current", "15000\n");
  root.write("sys/fs/cgroup/slice/memory.stat", "anon 5\ninactive_file 1000\n");
  EXPECT_EQ(available().bytes, 6000) << "the parent group's limit applies, and inactive cache can be reclaimed";
  root.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9000\n");
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "8500\n");
  EXPECT_EQ(available().bytes, 500);
  EXPECT_EQ(available().source, "the limit of control group " + root.path("sys/fs/cgroup/memory"));
  root.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "9500\n");
  EXPECT_EQ(available().bytes, 0);
}

}  // namespace
}  // namespace zr::test
