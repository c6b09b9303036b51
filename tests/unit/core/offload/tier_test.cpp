// What the host requires of a tier's plug-in, and the errors of its transfers.
#include "offload/tier.hpp"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <semaphore>
#include <stdexcept>
#include <utility>

#include "base/log.hpp"
#include "comm/comm_runtime.hpp"
#include "zr/error.hpp"
#include "zr/offload.hpp"

#pragma GCC visibility push(hidden)  // as in the headers of sdk/
namespace zr::test {
namespace {

using host::offload::TierStore;

// What the plug-in below answers.
struct Answers {
  zr_offload_caps caps{sizeof(zr_offload_caps), 0, 0, 512, 0, 0, 2, 0};
  uint64_t id = 7;
  zr_view view{};
  zr_code started = ZR_OK;    // returned by read() and write()
  zr_code completed = ZR_OK;  // with which their completion resolves
  bool late = false;          // their completion resolves after two lines of the log
  bool slow = false;          // they return after two lines of the log
};
Answers answers;
std::optional<Done> unresolved;      // of a late transfer
std::binary_semaphore two_lines{0};  // released after the second line of the log
alignas(512) std::array<char, 8192> memory;

class Answering : public Offload<Answering> {
 public:
  explicit Answering(const Host& host) : host_(host) {}
  zr_offload_caps caps() const { return answers.caps; }
  uint64_t reserve(uint64_t, const char*) { return answers.id++; }
  void release(uint64_t) noexcept {}
  void write(const zr_transfer*, uint32_t, zr_stream*, zr_done* done) { transfer(done); }
  void read(const zr_transfer*, uint32_t, zr_stream*, zr_done* done) { transfer(done); }
  zr_view map(uint64_t) { return answers.view; }
  void unmap(uint64_t) noexcept {}

 private:
  void transfer(zr_done* done) const {
    if (answers.started != ZR_OK) throw PluginError(answers.started, "cannot start");
    if (answers.late) {
      unresolved = Done::retained(host_, done);
      return;
    }
    if (answers.slow) two_lines.acquire();
    Done::retained(host_, done).resolve(answers.completed, 0, "is broken");
  }
  const Host host_;
};

// "exit code N: text" of the error that `call` throws; "" if it throws none.
template <class Call>
std::string error_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return "exit code " + std::to_string(error.exit_code()) + ": " + error.what();
  }
  return "";
}

class TierStoreTest : public ::testing::Test {
 protected:
  TierStoreTest() {
    answers = {};
    answers.view = {memory.data(), std::ssize(memory), ZR_U8, 0, {1, 0}};
    host::comm::offer_async(host_);
  }
  std::unique_ptr<TierStore> open(const zr_component* table = &kTable,
                                  std::chrono::milliseconds long_wait = std::chrono::minutes(1)) {
    static constexpr zr_module module{
        sizeof(zr_module), ZR_ABI_MINOR, ZR_ABI_MINOR, "tier", "tests", "1.0.0", "", nullptr, 0, 0, nullptr, nullptr};
    return std::make_unique<TierStore>(
        host_,
        std::make_unique<host::plugin::Instance>(host_, host::plugin::Component{table, &module, "tier"}, config_,
                                                 "offload.tier"),
        1, long_wait);
  }
  // Expects the warnings of a read that completes after the second one.
  void expect_two_warnings();
  std::string problem_of_caps() {
    return error_of([&] { open(); });
  }
  std::string problem_of_map() {
    const auto tier = open();
    const uint64_t allocation = tier->reserve(4096, {{host::MemoryKind::other, "test", 4096}});
    return error_of([&] { tier->map(allocation); });
  }
  std::string problem_of_transfer(bool writes) {
    const auto tier = open();
    const uint64_t allocation = tier->reserve(4096, {{host::MemoryKind::other, "test", 4096}});
    const std::string error = error_of([&] {
      (writes ? tier->write(allocation, 0, memory.data(), 512, "weights")
              : tier->read(allocation, 0, memory.data(), 512, "weights"))
          .wait();
    });
    EXPECT_EQ(tier->failure(), error.empty() ? "" : error.substr(error.find(": ") + 2));
    return error;
  }
  static constexpr zr_component kTable = component<Answering>("tier", "1.0.0");
  const std::string bug_ = "exit code 70: offload 'tier' (tier): ";

 private:
  host::Ledger ledger_;
  host::ThreadPool pool_{1};
  host::plugin::PluginHost host_{ledger_, pool_};
  host::config::JobConfig config_;
};

TEST_F(TierStoreTest, AlignmentIsAPowerOfTwoThatTheHostCanAllocate) {
  for (const uint64_t align : {0, 1, 512, 2 << 20}) {
    answers.caps.io_align = align;
    EXPECT_EQ(problem_of_caps(), "");
  }
  answers.caps.io_align = 3;
  EXPECT_EQ(problem_of_caps(),
            bug_ + "caps: io_align is 3, but it must be a power of two up to 2097152: this is a bug in the plug-in");
  answers.caps.io_align = 64 << 20;
  EXPECT_EQ(problem_of_caps(), bug_ +
                                   "caps: io_align is 67108864, but it must be a power of two up to 2097152: this is "
                                   "a bug in the plug-in");
}

TEST_F(TierStoreTest, TransfersAreFromCpuMemory) {
  answers.caps.device_types = 4;
  EXPECT_EQ(problem_of_caps(), bug_ +
                                   "caps: device_types is 0x4, without CPU memory (0x2), from which the host "
                                   "transfers: this is a bug in the plug-in");
}

TEST_F(TierStoreTest, MappableTierHasMapAndUnmap) {
  static zr_offload_api api = *static_cast<const zr_offload_api*>(kTable.api);
  static zr_component table = kTable;
  api.map = nullptr;
  table.api = &api;
  EXPECT_EQ(error_of([&] { open(&table); }),
            bug_ + "caps: flags has ZR_TIER_MAPPABLE, but map or unmap is null: this is a bug in the plug-in");
}

TEST_F(TierStoreTest, AllocationsHaveDifferentIds) {
  const auto tier = open();
  const std::vector<TierStore::LedgerEntry> entries{{host::MemoryKind::other, "test", 4096}};
  EXPECT_EQ(tier->reserve(4096, entries), 7u);
  EXPECT_EQ(tier->reserve(4096, entries), 8u);
  answers.id = 7;
  EXPECT_EQ(error_of([&] { tier->reserve(4096, entries); }),
            bug_ + "reserve: the new allocation has the id 7 of another one: this is a bug in the plug-in");
  tier->release(7);
  answers.id = 7;
  EXPECT_EQ(error_of([&] { tier->reserve(4096, entries); }), "");
}

TEST_F(TierStoreTest, MappedMemoryIsAllOfTheAllocation) {
  EXPECT_EQ(problem_of_map(), "");
  answers.view.count = 4095;
  EXPECT_EQ(problem_of_map(), bug_ + "map: the memory has 4095 elements of dtype " + std::to_string(ZR_U8) +
                                  ", but the allocation has 4096 bytes (dtype " + std::to_string(ZR_U8) +
                                  "): this is a bug in the plug-in");
  answers.view = {memory.data() + 64, 8000, ZR_U8, 0, {1, 0}};
  EXPECT_EQ(problem_of_map(), bug_ + "map: the memory is not aligned to 512 bytes: this is a bug in the plug-in");
  answers.view.data = nullptr;
  EXPECT_EQ(problem_of_map(), bug_ + "map: the memory is null: this is a bug in the plug-in");
}

TEST_F(TierStoreTest, FailedTransferHasTheExitCodeOfItsError) {
  EXPECT_EQ(problem_of_transfer(true), "");
  EXPECT_EQ(problem_of_transfer(false), "");
  const std::string plugin = "offload 'tier' (tier): ";
  for (const auto& [code, exit] : std::map<zr_code, int>{
           {ZR_INVALID, 2}, {ZR_IO, 3}, {ZR_NOMEM, 3}, {ZR_CANCELLED, 4}, {ZR_INTERNAL, 70}, {ZR_AGAIN, 70}}) {
    const std::string start = "exit code " + std::to_string(exit) + ": " + plugin;
    answers.started = code;
    EXPECT_EQ(problem_of_transfer(true), start + "write: weights: cannot start");
    EXPECT_EQ(problem_of_transfer(false), start + "read: weights: cannot start");
    answers.started = ZR_OK;
    if (code == ZR_AGAIN) continue;
    answers.completed = code;
    EXPECT_EQ(problem_of_transfer(true), start + "transfer: weights: is broken");
    answers.completed = ZR_OK;
  }
}

// Completes the transfer that waits after the second line of the log.
struct CompletesAfterTwoLines : host::CurrentLine {
  CompletesAfterTwoLines() { host::set_current_line(this); }
  ~CompletesAfterTwoLines() override { host::remove_current_line(this); }
  void erase() override {}
  void draw() override {
    if (++lines != 2) return;
    if (answers.late)
      std::exchange(unresolved, std::nullopt)->resolve();
    else
      two_lines.release();
  }
  int lines = 0;
};

void TierStoreTest::expect_two_warnings() {
  const auto tier = open(&kTable, std::chrono::milliseconds(100));
  const uint64_t allocation = tier->reserve(4096, {{host::MemoryKind::other, "test", 4096}});
  ::testing::internal::CaptureStderr();
  {
    const CompletesAfterTwoLines completes;
    tier->read(allocation, 0, memory.data(), 512, "the state of 'w'").wait();
  }
  const std::string start =
      "zeroth: warning: offload 'tier' (tier): transfer: the state of 'w': the transfer is not complete after ";
  const std::string end =
      ", and this rank waits for it; look for errors of the disk in the system's log (dmesg); if there are none, and "
      "the tier is not just slow, its plug-in has a bug: stop the job\n";
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_EQ(log.find(start + "0.1s" + end + start + "0.2s" + end), 0u) << log;
  EXPECT_EQ(tier->failure(), "");
}

TEST_F(TierStoreTest, WaitsForALateTransferAndWarns) {
  answers.late = true;
  expect_two_warnings();
}

TEST_F(TierStoreTest, WarnsWhileATransferDoesNotReturn) {
  answers.slow = true;
  expect_two_warnings();
}

TEST_F(TierStoreTest, TransferThatThrowsIsABugInThePlugin) {
  // The layer catches exceptions; this table does not.
  static constexpr auto throws = [](void*, const zr_transfer*, uint32_t, zr_stream*, zr_done*, zr_error*) -> zr_code {
    throw std::runtime_error("no slot");
  };
  zr_offload_api api = *static_cast<const zr_offload_api*>(kTable.api);
  api.write = throws;
  zr_component table = kTable;
  table.api = &api;
  const auto tier = open(&table);
  const uint64_t allocation = tier->reserve(4096, {{host::MemoryKind::other, "test", 4096}});
  EXPECT_EQ(error_of([&] { tier->write(allocation, 0, memory.data(), 512, "weights").wait(); }),
            bug_ + "write: weights: threw an exception across the C ABI: no slot; this is a bug in the plug-in");
}

}  // namespace
}  // namespace zr::test
