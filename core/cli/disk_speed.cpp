#include "cli/disk_speed.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>

#include "base/error.hpp"
#include "base/huge_page_memory.hpp"
#include "base/text.hpp"
#include "comm/comm_runtime.hpp"
#include "offload/tier.hpp"

namespace zr::host::cli {

namespace {
using Clock = std::chrono::steady_clock;
constexpr int64_t kBlocks[] = {256 << 10, 1 << 20, 4 << 20, 8 << 20}, kLargest = 8 << 20;
constexpr int64_t kDepths[] = {1, 4, 8, 16}, kMaxDepth = 16;
enum class Way { read, write, mixed };

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// The number of transfers submitted to the tier at a time: more than its depth, so that it never waits for the caller.
int64_t handed(int64_t depth) { return depth + std::max<int64_t>(depth / 2, 2); }

// The memory of the transfers, filled with random bytes, which a disk cannot compress.
struct Memory {
  explicit Memory(int64_t size) : data(allocate_huge_pages(size)) {
    if (!data)
      fail_environment("zeroth tune: cannot allocate " + bytes_text(size) + " for transfers; free memory on this node");
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
        slot_bytes_(handed(depth) * kLargest),
        bytes_(test.bytes / std::ssize(kDepths)),
        memory_(memory.data.get()) {
    comm::offer_async(host_);
    const std::string table = "offload." + std::string(test.tier.table->id);
    std::vector<std::string> all = test.overrides;
    for (const std::string& key : {"path=" + config::toml_text(test.path), "block_bytes=" + std::to_string(kLargest),
                                   "depth=" + std::to_string(depth)})
      all.push_back(table + "." + key);
    const config::JobConfig config =
        config::Document::parse("", "zeroth tune", all)
            .check(config::keys_of(test.tier.table->keys, test.tier.table->n_keys, table), 1);
    store_ = std::make_unique<offload::TierStore>(
        host_, std::make_unique<plugin::Instance>(host_, test.tier, config, table), 1);
    check_free_space(test);
    slot_ = store_->reserve(bytes_, {{MemoryKind::other, "measured", bytes_}});
    store_->prepare(memory_, slot_bytes_);
  }
  ~Bench() { store_->forget(memory_, slot_bytes_); }
  Bench(const Bench&) = delete;

  // Writes the file for the first time, for at most `seconds`, but always enough of it for a measurement.
  void fill(double seconds) {
    const Clock::time_point begin = Clock::now();
    std::vector<offload::Transfer> under_way(static_cast<std::size_t>(handed(depth_)));
    const int64_t least = std::min(bytes_, 2 * slot_bytes_);
    for (int64_t i = 0; (i + 1) * kLargest <= bytes_; ++i) {
      offload::Transfer& one = under_way[static_cast<std::size_t>(i) % under_way.size()];
      one.wait();
      if (used_ >= least && seconds_since(begin) > seconds) break;
      one = move(true, i * kLargest, i % std::ssize(under_way), kLargest);
      used_ += kLargest;
    }
    for (offload::Transfer& one : under_way) one.wait();
  }

  // Returns bytes per second. With Way::mixed, reads and writes alternate in different halves of the file.
  double speed(Way way, int64_t block, double seconds) {
    const int64_t blocks = used_ / block, most = std::min(handed(depth_), blocks / 2);
    if (most < depth_) return 0;
    std::vector<offload::Transfer> under_way(static_cast<std::size_t>(most));
    const Clock::time_point begin = Clock::now();
    int64_t i = 0;
    for (; i < most || seconds_since(begin) < seconds; ++i) {
      offload::Transfer& one = under_way[static_cast<std::size_t>(i % most)];
      one.wait();
      const bool writes = way == Way::write || (way == Way::mixed && i % 2 == 1);
      const int64_t at = way == Way::mixed ? i / 2 + (writes ? blocks / 2 : 0) : i;
      one = move(writes, at % blocks * block, i % most, block);
    }
    for (offload::Transfer& one : under_way) one.wait();
    return static_cast<double>(i * block) / seconds_since(begin);
  }

  int64_t used() const { return used_; }
  int64_t written() const { return store_->written_bytes(); }

 private:
  void check_free_space(const DiskTest& test) const {
    if (store_->info().in_memory())
      fail_user("zeroth tune: tier '" + store_->info().id + "' is memory, not a disk; name a disk tier with --tier");
    zr_offload_caps caps{};
    caps.size = sizeof caps;
    CallError error;
    const plugin::Instance& tier = store_->instance();
    check(tier.api<zr_offload_api>()->caps(tier.self(), &caps, &error), error, tier.who("caps"));
    if (depth_ == kDepths[0] && caps.capacity > 0 && caps.capacity < static_cast<uint64_t>(test.bytes))
      fail_environment("zeroth tune: --bytes " + bytes_text(test.bytes) + ": " + test.path + " has " +
                       bytes_text(static_cast<int64_t>(caps.capacity)) +
                       " free; give fewer bytes, or a --path on another disk");
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
  plugin::PluginHost host_{ledger_, pool_};
  std::unique_ptr<offload::TierStore> store_;
  uint64_t slot_ = 0;
  int64_t used_ = 0;
};
}  // namespace

const DiskPoint& DiskSpeed::best() const {
  const DiskPoint* best = &points.front();
  for (const DiskPoint& one : points)
    if (one.mixed > best->mixed) best = &one;
  const double enough = 0.95 * best->mixed;
  for (const DiskPoint& one : points)
    if (one.mixed >= enough && one.block_bytes * one.depth < best->block_bytes * best->depth) best = &one;
  return *best;
}

DiskSpeed measure_disk(const DiskTest& test, const std::function<void(int done, int all)>& at) {
  const Clock::time_point begin = Clock::now();
  constexpr Way kWays[] = {Way::write, Way::read, Way::mixed};
  constexpr auto kPoints = std::size(kBlocks) * std::size(kDepths);
  // Every round measures all points, because the load of other processes on the disk changes with time.
  const int rounds = std::clamp(static_cast<int>(test.seconds / 10), 1, 6);
  const int all = rounds * static_cast<int>(kPoints * std::size(kWays));
  const Memory memory(handed(kMaxDepth) * kLargest);
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
      for (const Way way : kWays) {
        const double seconds = std::max(test.seconds - seconds_since(begin), 0.0) / (all - done);
        const int64_t block = kBlocks[p / std::size(kDepths)];
        rates[p][static_cast<int>(way)].push_back(benches[p % std::size(kDepths)]->speed(way, block, seconds));
        at(++done, all);
      }
  const auto median = [](std::vector<double>& of) {
    std::sort(of.begin(), of.end());
    return (of[of.size() / 2] + of[(of.size() - 1) / 2]) / 2;
  };
  for (std::size_t p = 0; p < kPoints; ++p)
    speed.points.push_back({kBlocks[p / std::size(kDepths)], kDepths[p % std::size(kDepths)], median(rates[p][0]),
                            median(rates[p][1]), median(rates[p][2])});
  for (const auto& bench : benches) speed.written += bench->written();
  return speed;
}

}  // namespace zr::host::cli
