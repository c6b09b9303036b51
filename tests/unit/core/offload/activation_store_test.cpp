// Activations offloaded to a tier are restored unchanged, from memory that is reserved once. Uses the real tiers.
#include "offload/activation_store.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "base/error.hpp"
#include "comm/comm_runtime.hpp"
#include "support/scratch.hpp"

namespace zr::host {
namespace {

constexpr int64_t kKiB = 1024, kMiB = 1024 * kKiB;

std::string bytes_of(int64_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(static_cast<std::size_t>(bytes), 0);
  for (char& c : text) c = static_cast<char>(random());
  return text;
}

// The library's function table, but mapping the second allocation fails.
plugin::Component that_maps_once(const plugin::Component& component) {
  static const zr_offload_api* whole;
  static int times;
  static zr_offload_api api;
  static zr_component table;
  whole = static_cast<const zr_offload_api*>(component.api());
  times = 0;
  api = *whole;
  api.map = [](void* self, uint64_t slot, zr_view* out, zr_error* error) -> zr_code {
    if (++times != 2) return whole->map(self, slot, out, error);
    std::snprintf(error->msg, sizeof error->msg, "the second is not mapped");
    return error->code = ZR_IO;
  };
  table = *component.table;
  table.api = &api;
  return {&table, component.module, component.file};
}

// A tier as a Session uses it, and activations on it.
class Rig {
 public:
  explicit Rig(const std::string& id, const std::vector<std::string>& values = {}, const std::string& fault = "",
               int64_t staging = 4 * kMiB, plugin::Component (*changed)(const plugin::Component&) = nullptr)
      : host_(ledger, pool_) {
    ::setenv("ZR_TIER_FAULT", fault.c_str(), 1);
    comm::offer_async(host_);
    host_.offer("zr.host.job/1", &job_);
    const std::string folder = fault.empty() ? ZR_BUILD_DIR "/plugins" : ZR_BUILD_DIR "/tests/plugins/failing";
    plugin::Component component = plugin::Registry({folder}).load(plugin::Role::offload, id, "here");
    if (changed) component = changed(component);
    std::vector<std::string> settings;
    for (const std::string& value : values) settings.push_back("offload." + id + "." + value);
    const config::JobConfig config =
        config::Document::parse("", "job.toml", settings)
            .check(config::keys_of(component.table->keys, component.table->n_keys, "offload." + id), 1);
    tier = std::make_unique<offload::TierStore>(
        host_, std::make_unique<plugin::Instance>(host_, component, config, "offload." + id), 1);
    all = std::make_unique<offload::ActivationStore>(*tier, ledger, staging);
  }
  ~Rig() { ::unsetenv("ZR_TIER_FAULT"); }
  uint64_t put(const std::string& bytes) { return all->put(bytes.data(), std::ssize(bytes)); }
  std::string get(uint64_t record, std::size_t bytes) {
    std::string text(bytes, 0);
    all->get(record, text.data());
    return text;
  }
  Ledger ledger;

 private:
  ThreadPool pool_{1};
  plugin::PluginHost host_;
  zr_job_service job_{sizeof job_, 0, 1, 0, 1, 0, "job-1", ""};

 public:
  std::unique_ptr<offload::TierStore> tier;
  std::unique_ptr<offload::ActivationStore> all;
};

class ActivationStoreTest : public ::testing::TestWithParam<const char*> {
 protected:
  std::vector<std::string> values() const {
    return GetParam() == std::string("nvme") ? std::vector{"path=\"" + scratch_.folder().string() + "\""}
                                             : std::vector<std::string>{};
  }
  Tier tier() const { return GetParam() == std::string("nvme") ? Tier::disk : Tier::host; }
  const test::Scratch scratch_;
};

TEST_P(ActivationStoreTest, ReturnsTheSameBytesInAnyOrderAnyNumberOfTimes) {
  Rig rig(GetParam(), values());
  std::vector<std::string> data;
  std::vector<uint64_t> records;
  for (const int64_t bytes :
       {int64_t{1}, 64 * kKiB, 64 * kKiB + 4, kMiB - 1, 3 * kMiB + 777, 9 * kMiB, 5000 * int64_t{1}})
    records.push_back(rig.put(data.emplace_back(bytes_of(bytes, static_cast<unsigned>(bytes)))));
  std::mt19937 random(7);
  for (int i = 0; i < 40; ++i) {
    const std::size_t one = random() % data.size();
    std::vector<uint64_t> next;
    for (int k = 0; k < 3; ++k) next.push_back(records[random() % records.size()]);
    rig.all->prefetch(next);
    ASSERT_TRUE(rig.get(records[one], data[one].size()) == data[one]) << one << " at " << i;
  }
}

TEST_P(ActivationStoreTest, ReservesMemoryInTheFirstStepOnly) {
  Rig rig(GetParam(), values());
  int64_t reserved = 0;
  for (int step = 0; step < 4; ++step) {
    std::vector<std::pair<uint64_t, std::string>> saved;
    for (int layer = 0; layer < 6; ++layer)
      for (const int64_t bytes : {100 * kKiB, 300 * kKiB, 101 * kKiB}) {
        std::string data = bytes_of(bytes, static_cast<unsigned>(100 * step + layer));
        const uint64_t record = rig.put(data);
        saved.emplace_back(record, std::move(data));
      }
    for (; !saved.empty(); saved.pop_back()) {
      ASSERT_TRUE(rig.get(saved.back().first, saved.back().second.size()) == saved.back().second);
      rig.all->drop(saved.back().first);
    }
    if (step == 0) reserved = rig.all->counts().reserved;
  }
  EXPECT_EQ(reserved, 18);
  EXPECT_EQ(rig.all->counts().reserved, reserved);
  EXPECT_EQ(rig.all->counts().put, 4 * 18);
  EXPECT_EQ(rig.all->counts().got, 4 * 18);
}

TEST_P(ActivationStoreTest, RecordsAllItsMemoryInTheLedger) {
  Rig rig(GetParam(), values());
  rig.put(bytes_of(5 * kMiB, 1));
  rig.all->drop(rig.put(bytes_of(64 * kKiB, 2)));
  EXPECT_EQ(rig.ledger.held(tier(), MemoryKind::activations), 5 * kMiB + 64 * kKiB) << "memory is kept for reuse";
  EXPECT_EQ(rig.ledger.held(Tier::host, MemoryKind::staging), tier() == Tier::disk ? 4 * kMiB : 0);
  EXPECT_EQ(rig.ledger.held(Tier::device), 0);
  rig.all.reset();
  EXPECT_EQ(rig.ledger.held(tier(), MemoryKind::activations), 0);
  EXPECT_EQ(rig.ledger.held(Tier::host, MemoryKind::staging), 0);
}

INSTANTIATE_TEST_SUITE_P(Tiers, ActivationStoreTest, ::testing::Values("cpu", "nvme"),
                         [](const auto& info) { return std::string(info.param); });

TEST(ActivationStoreCpuTest, ReleasesMemoryThatCannotBeMapped) {
  Rig rig("cpu", {}, "", 4 * kMiB, that_maps_once);
  const std::string data = bytes_of(kMiB, 1);
  const uint64_t first = rig.put(data);
  try {
    rig.put(data);
    FAIL() << "the second is not mapped";
  } catch (const Error& failure) {
    const std::string text = failure.what();
    EXPECT_NE(text.find("the second is not mapped; needed for an activation of 1.00 MiB"), text.npos) << text;
  }
  EXPECT_EQ(rig.ledger.held(Tier::host, MemoryKind::activations), kMiB);
  EXPECT_EQ(rig.all->counts().reserved, 1);
  const uint64_t third = rig.put(data);
  EXPECT_TRUE(rig.get(first, data.size()) == data);
  EXPECT_TRUE(rig.get(third, data.size()) == data);
  rig.all.reset();
  EXPECT_EQ(rig.ledger.held(Tier::host, MemoryKind::activations), 0);
}

class ActivationStoreDiskTest : public ::testing::Test {
 protected:
  const test::Scratch scratch_;
  const std::vector<std::string> values_{"path=\"" + scratch_.folder().string() + "\""};
};

TEST_F(ActivationStoreDiskTest, PrefetchesAnnouncedActivations) {
  Rig rig("nvme", values_);
  std::vector<uint64_t> records;
  for (unsigned i = 0; i < 12; ++i) records.push_back(rig.put(bytes_of(kMiB, i)));
  // The last four are still in the memory they were written from; the eight before them are not.
  for (unsigned i = 12; i-- > 0;) {
    ASSERT_TRUE(rig.get(records[i], kMiB) == bytes_of(kMiB, i));
    rig.all->drop(records[i]);
    if (i >= 3) {
      const auto first = records.begin() + i;
      rig.all->prefetch({*(first - 1), *(first - 2), *(first - 3)});
      ::usleep(50000);  // simulates the work of backward
    }
  }
  EXPECT_GE(rig.all->counts().ready, 10) << "a disk that others use may be late once or twice";
  EXPECT_EQ(rig.tier->written_bytes(), 12 * kMiB);
  EXPECT_EQ(rig.tier->read_bytes(), 8 * kMiB) << "no activation is read twice, or while it is still in memory";
}

TEST_F(ActivationStoreDiskTest, UsesBoundedMemory) {
  Rig rig("nvme", values_, "", 2 * kMiB);
  const std::string large = bytes_of(40 * kMiB, 5);
  const uint64_t record = rig.put(large);
  EXPECT_EQ(rig.ledger.held(Tier::host), 2 * kMiB + rig.ledger.held(Tier::host, MemoryKind::other));
  EXPECT_TRUE(rig.get(record, large.size()) == large);
}

TEST_F(ActivationStoreDiskTest, DoesNotWaitForAWriteBeforeItMust) {
  using Clock = std::chrono::steady_clock;
  Rig rig("nvme", values_, "slow=2000ms");
  const auto begin = Clock::now();
  const std::string data = bytes_of(64 * kKiB, 1);
  const uint64_t record = rig.put(data);
  EXPECT_TRUE(rig.get(record, data.size()) == data) << "while it is being written";
  rig.all->drop(record);
  EXPECT_LT(Clock::now() - begin, std::chrono::milliseconds(2000));
  rig.put(data);
  EXPECT_GE(Clock::now() - begin, std::chrono::seconds(2)) << "its allocation is not free before the write ends";
  EXPECT_EQ(rig.all->counts().reserved, 1);
}

TEST_F(ActivationStoreDiskTest, NamesFileAndOffsetOfAFailedRead) {
  Rig rig("nvme", values_, "read=EIO@2");
  const std::string data = bytes_of(kMiB, 1);
  const uint64_t first = rig.put(data);
  for (int i = 0; i < 6; ++i) rig.put(data);  // so that the first one must be read from disk
  EXPECT_TRUE(rig.get(first, data.size()) == data);
  try {
    rig.get(first, data.size());
    FAIL() << "the second read fails";
  } catch (const Error& failure) {
    EXPECT_EQ(failure.exit_code(), exit_code::environment);
    const std::string text = failure.what();
    for (const std::string& part :
         {std::string("an activation of 1.00 MiB (offload.activations)"), scratch_.folder().string(),
          std::string("reading 1048576 bytes at byte 0 failed: Input/output error")})
      EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
  }
  EXPECT_TRUE(rig.get(first, data.size()) == data) << "the next read succeeds";
}

TEST_F(ActivationStoreDiskTest, ReportsAFailedBackgroundWriteAtTheNextCall) {
  Rig rig("nvme", values_, "write=EIO@1");
  rig.all->drop(rig.put(bytes_of(kMiB, 1)));
  EXPECT_THROW(
      {
        for (int i = 0; i < 8; ++i) rig.put(bytes_of(kMiB, 2));
      },
      Error);
}

}  // namespace
}  // namespace zr::host
