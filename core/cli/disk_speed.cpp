#include "cli/disk_speed.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>

#include "base/error.hpp"
#include "base/huge_page_memory.hpp"
#include "base/text.hpp"
#include "job/plan_inputs.hpp"
#include "offload/tier.hpp"

namespace zr::host::cli {

namespace {
using Clock = std::chrono::steady_clock;
constexpr int64_t kBlocks[] = {256 << 10, 1 << 20, 4 << 20, 8 << 20}, kLargest = 8 << 20;
constexpr int64_t kDepths[] = {1, 4, 8, 16}, kMaxDepth = 16;
enum class Way { read, write, mixed };

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// The number of transfers submitted to the tier at a time: more than its depth, so that it never waits for the caller.
int64_t usable_depth(int64_t depth) { return depth + std::max<int64_t>(depth / 2, 2); }

// The memory of the transfers, filled with random bytes, which a disk cannot compress.
struct Memory {
  explicit Memory(int64_t size) : data(allocate_huge_pages(size)) {
    if (!data)
      fail_environment(
          fmt::format("zeroth tune: cannot allocate {} for transfers; free memory on this node", bytes_text(size)));
    std::mt19937_64 random(1);
    for (int64_t i = 0; i < size; i += 8) {
      const uint64_t word = random();
      std::memcpy(data.get() + i, &word, 8);
    }
  }
  HugePageMemory data;
};

// An instance of the tier with one depth, and its part of the file.
class Bench {
 public:
  Bench(const DiskTest& test, int64_t depth, const Memory& memory)
      : depth_(depth),
        slot_bytes_(usable_depth(depth) * kLargest),
        bytes_(test.bytes / std::ssize(kDepths)),
        memory_(memory.data.get()) {
    const std::string table = fmt::format("offload.{}", test.tier.table->id);
    std::vector<std::string> overrides = test.overrides;
    for (const std::string& key : {"path=" + config::toml_text(test.path), fmt::format("block_bytes={}", kLargest),
                                   fmt::format("depth={}", depth)})
      overrides.push_back(fmt::format("{}.{}", table, key));
    const config::JobConfig config =
        config::Document::parse("", "zeroth tune", overrides)
            .check(config::keys_of(test.tier.table->keys, test.tier.table->n_keys, table), 1);
    store_ = std::make_unique<offload::TierStore>(
        host_, std::make_unique<plugin::Instance>(host_, test.tier, config, table), 1);
    check_free_space(test);
    slot_ = store_->reserve(bytes_, {{MemoryKind::other, "measured", bytes_}});
    store_->register_memory(memory_, slot_bytes_);
  }
  ~Bench() { store_->unregister_memory(memory_, slot_bytes_); }
  Bench(const Bench&) = delete;

  // Writes the file for the first time, for at most `seconds`, but always enough of it for a measurement.
  void fill(double seconds) {
    const Clock::time_point begin = Clock::now();
    std::vector<offload::Transfer> under_way(static_cast<std::size_t>(usable_depth(depth_)));
    const int64_t min_bytes = std::min(bytes_, 2 * slot_bytes_);
    for (int64_t i = 0; (i + 1) * kLargest <= bytes_; ++i) {
      offload::Transfer& transfer = under_way[static_cast<std::size_t>(i) % under_way.size()];
      transfer.wait();
      if (used_ >= min_bytes && seconds_since(begin) > seconds) break;
      transfer = move(true, i * kLargest, i % std::ssize(under_way), kLargest);
      used_ += kLargest;
    }
    for (offload::Transfer& transfer : under_way) transfer.wait();
  }

  // Returns bytes per second. With Way::mixed, reads and writes alternate in different halves of the file.
  double speed(Way way, int64_t block, double seconds) {
    const int64_t blocks = used_ / block, in_flight = std::min(usable_depth(depth_), blocks / 2);
    if (in_flight < depth_) return 0;
    std::vector<offload::Transfer> under_way(static_cast<std::size_t>(in_flight));
    const Clock::time_point begin = Clock::now();
    int64_t i = 0;
    for (; i < in_flight || seconds_since(begin) < seconds; ++i) {
      offload::Transfer& transfer = under_way[static_cast<std::size_t>(i % in_flight)];
      transfer.wait();
      const bool writes = way == Way::write || (way == Way::mixed && i % 2 == 1);
      const int64_t position = way == Way::mixed ? i / 2 + (writes ? blocks / 2 : 0) : i;
      transfer = move(writes, position % blocks * block, i % in_flight, block);
    }
    for (offload::Transfer& transfer : under_way) transfer.wait();
    return static_cast<double>(i * block) / seconds_since(begin);
  }

  int64_t used() const { return used_; }
  int64_t written() const { return store_->written_bytes(); }

 private:
  void check_free_space(const DiskTest& test) const {
    if (store_->info().in_memory())
      fail_user(
          fmt::format("zeroth tune: tier '{}' is memory, not a disk; name a disk tier with --tier", store_->info().id));
    zr_offload_caps caps{};
    caps.size = sizeof caps;
    const plugin::Instance& tier = store_->instance();
    tier.call("caps", [&](zr_error* error) { return tier.api<zr_offload_api>()->caps(tier.self(), &caps, error); });
    if (depth_ == kDepths[0] && caps.capacity > 0 && caps.capacity < static_cast<uint64_t>(test.bytes))
      fail_environment(
          fmt::format("zeroth tune: --bytes {}: {} has {} free; give fewer bytes, or a --path on another disk",
                      bytes_text(test.bytes), test.path, bytes_text(static_cast<int64_t>(caps.capacity))));
  }
  offload::Transfer move(bool writes, int64_t offset, int64_t index, int64_t bytes) {
    char* memory = memory_ + index * bytes;
    return writes ? store_->write(slot_, offset, memory, bytes, "a block")
                  : store_->read(slot_, offset, memory, bytes, "a block");
  }

  const int64_t depth_, slot_bytes_, bytes_;  // slot_bytes_: size of the used part of memory_; bytes_: of the file
  char* const memory_;
  Ledger ledger_;
  ThreadPool pool_{1};
  job::EngineHost host_{ledger_, pool_};
  std::unique_ptr<offload::TierStore> store_;
  uint64_t slot_ = 0;
  int64_t used_ = 0;
};
}  // namespace

const DiskPoint& DiskSpeed::best() const {
  const DiskPoint* best = &points.front();
  for (const DiskPoint& point : points)
    if (point.mixed > best->mixed) best = &point;
  const double enough = 0.95 * best->mixed;
  for (const DiskPoint& point : points)
    if (point.mixed >= enough && point.block_bytes * point.depth < best->block_bytes * best->depth) best = &point;
  return *best;
}

DiskSpeed measure_disk(const DiskTest& test, const std::function<void(int done, int total)>& on_progress) {
  const Clock::time_point begin = Clock::now();
  constexpr Way kAccesses[] = {Way::write, Way::read, Way::mixed};
  constexpr auto kPoints = std::size(kBlocks) * std::size(kDepths);
  // Every round measures all points, because the load of other processes on the disk changes with time.
  const int rounds = std::clamp(static_cast<int>(test.seconds / 10), 1, 6);
  const int total = rounds * static_cast<int>(kPoints * std::size(kAccesses));
  const Memory memory(usable_depth(kMaxDepth) * kLargest);
  std::vector<std::unique_ptr<Bench>> benches;
  DiskSpeed speed;
  for (const int64_t depth : kDepths) {
    benches.push_back(std::make_unique<Bench>(test, depth, memory));
    benches.back()->fill(test.seconds / 16);
    speed.used += benches.back()->used();
  }
  std::vector<double> rates[kPoints][3];
  int done = 0;
  for (int round = 0; round < rounds; ++round)
    for (std::size_t p = 0; p < kPoints; ++p)
      for (const Way way : kAccesses) {
        const double seconds = std::max(test.seconds - seconds_since(begin), 0.0) / (total - done);
        const int64_t block = kBlocks[p / std::size(kDepths)];
        rates[p][static_cast<int>(way)].push_back(benches[p % std::size(kDepths)]->speed(way, block, seconds));
        on_progress(++done, total);
      }
  const auto median = [](std::vector<double>& values) {
    std::sort(values.begin(), values.end());
    return (values[values.size() / 2] + values[(values.size() - 1) / 2]) / 2;
  };
  for (std::size_t p = 0; p < kPoints; ++p)
    speed.points.push_back({kBlocks[p / std::size(kDepths)], kDepths[p % std::size(kDepths)], median(rates[p][0]),
                            median(rates[p][1]), median(rates[p][2])});
  for (const auto& bench : benches) speed.written += bench->written();
  return speed;
}

}  // namespace zr::host::cli
