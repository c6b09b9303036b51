#include "cli/disk_speed.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>

#include "base/failure.hpp"
#include "base/text.hpp"
#include "comm/communicator.hpp"
#include "offload/tier.hpp"

namespace zr::host {

namespace {
using Clock = std::chrono::steady_clock;
constexpr int64_t kBlocks[] = {256 << 10, 1 << 20, 4 << 20, 8 << 20}, kLargest = 8 << 20;
constexpr int64_t kDepths[] = {1, 4, 8, 16};
enum class Way { read, write, mixed };

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// What is handed to the tier at a time: a little more than it has under way, so that it never waits for its caller.
int64_t handed(int64_t depth) { return depth + std::max<int64_t>(depth / 2, 2); }

// The tier at one depth, and its file.
class Bench {
 public:
  Bench(const DiskTest& test, int64_t depth) : depth_(depth) {
    offer_async(host_);
    const std::string table = "offload." + std::string(test.tier.table->id);
    std::vector<std::string> all = test.overrides;
    for (const std::string& key :
         {"path=" + toml_text(test.path), "block_bytes=" + std::to_string(kLargest), "depth=" + std::to_string(depth)})
      all.push_back(table + "." + key);
    const Config config = Document::parse("", "zeroth tune", all)
                              .check(keys_of(test.tier.table->keys, test.tier.table->n_keys, table), 1);
    store_ = std::make_unique<TierStore>(host_, std::make_unique<Instance>(host_, test.tier, config, table), 1);
    check_room(test);
    slot_ = store_->reserve(test.bytes, {{Kind::other, "measured", test.bytes}});
    room_ = handed(depth) * kLargest;
    memory_.reset(static_cast<char*>(std::aligned_alloc(4096, static_cast<std::size_t>(room_))));
    if (!memory_) fail_environment("zeroth tune: no memory for transfers: " + bytes_text(room_) + " are needed");
    std::mt19937_64 random(1);  // nothing that a disk could make smaller
    for (int64_t i = 0; i < room_; i += 8) {
      const uint64_t word = random();
      std::memcpy(memory_.get() + i, &word, 8);
    }
    store_->prepare(memory_.get(), room_);
  }
  ~Bench() { store_->forget(memory_.get(), room_); }
  Bench(const Bench&) = delete;

  // Writes the file for the first time, as far as `seconds` reach, but as much as it takes to measure anything.
  void fill(int64_t bytes, double seconds) {
    const Clock::time_point begin = Clock::now();
    std::vector<Transfer> under_way(static_cast<std::size_t>(handed(depth_)));
    const int64_t least = std::min(bytes, 2 * room_);
    for (int64_t i = 0; (i + 1) * kLargest <= bytes; ++i) {
      Transfer& one = under_way[static_cast<std::size_t>(i) % under_way.size()];
      one.wait();
      if (used_ >= least && seconds_since(begin) > seconds) break;
      one = move(true, i * kLargest, i % std::ssize(under_way), kLargest);
      used_ += kLargest;
    }
    for (Transfer& one : under_way) one.wait();
  }

  // Bytes per second; reads and writes go through the file in turns, far from one another.
  double speed(Way way, int64_t block, double seconds) {
    const int64_t blocks = used_ / block, most = std::min(handed(depth_), blocks / 2);
    if (most < depth_) return 0;
    std::vector<Transfer> under_way(static_cast<std::size_t>(most));
    const Clock::time_point begin = Clock::now();
    int64_t i = 0;
    for (; i < most || seconds_since(begin) < seconds; ++i) {
      Transfer& one = under_way[static_cast<std::size_t>(i % most)];
      one.wait();
      const bool writes = way == Way::write || (way == Way::mixed && i % 2 == 1);
      const int64_t at = way == Way::mixed ? i / 2 + (writes ? blocks / 2 : 0) : i;
      one = move(writes, at % blocks * block, i % most, block);
    }
    for (Transfer& one : under_way) one.wait();
    return static_cast<double>(i * block) / seconds_since(begin);
  }

  int64_t used() const { return used_; }
  int64_t written() const { return store_->written_bytes(); }

 private:
  void check_room(const DiskTest& test) const {
    if (store_->facts().in_memory())
      fail_user("zeroth tune: tier '" + store_->facts().id + "' is memory; name a tier of disk with --tier");
    zr_offload_caps caps{};
    caps.size = sizeof caps;
    CallError error;
    const Instance& tier = store_->instance();
    check(tier.api<zr_offload_api>()->caps(tier.self(), &caps, &error), error, tier.who("caps"));
    if (caps.capacity > 0 && caps.capacity < static_cast<uint64_t>(test.bytes))
      fail_environment("zeroth tune: --bytes " + bytes_text(test.bytes) + ": " + test.path + " has " +
                       bytes_text(static_cast<int64_t>(caps.capacity)) + " free; name fewer, or another --path");
  }
  Transfer move(bool writes, int64_t offset, int64_t place, int64_t bytes) {
    char* memory = memory_.get() + place * bytes;
    return writes ? store_->write(slot_, offset, memory, bytes, "a block")
                  : store_->read(slot_, offset, memory, bytes, "a block");
  }

  const int64_t depth_;
  Ledger ledger_;
  Pool pool_{1};
  Host host_{ledger_, pool_};
  std::unique_ptr<char, decltype(&std::free)> memory_{nullptr, &std::free};
  std::unique_ptr<TierStore> store_;
  uint64_t slot_ = 0;
  int64_t room_ = 0, used_ = 0;
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
  const int all = static_cast<int>(std::size(kDepths) * (std::size(kBlocks) * std::size(kWays) + 1));
  int done = 0, depths = static_cast<int>(std::size(kDepths));
  DiskSpeed speed;
  const auto left = [&] { return std::max(test.seconds - seconds_since(begin), 0.0); };
  for (const int64_t depth : kDepths) {
    const double end = seconds_since(begin) + left() / depths--;  // of this depth's share
    const auto share = [&](std::size_t parts) {
      return std::max(end - seconds_since(begin), 0.0) / static_cast<double>(parts);
    };
    Bench bench(test, depth);
    bench.fill(test.bytes, share(4));
    at(++done, all);
    std::size_t parts = std::size(kBlocks) * std::size(kWays);
    for (const int64_t block : kBlocks) {
      double rates[3];
      for (const Way way : kWays) {
        rates[static_cast<int>(way)] = bench.speed(way, block, share(parts--));
        at(++done, all);
      }
      speed.points.push_back({block, depth, rates[0], rates[1], rates[2]});
    }
    speed.used = speed.used == 0 ? bench.used() : std::min(speed.used, bench.used());
    speed.written += bench.written();
  }
  std::stable_sort(speed.points.begin(), speed.points.end(),
                   [](const DiskPoint& a, const DiskPoint& b) { return a.block_bytes < b.block_bytes; });
  return speed;
}

}  // namespace zr::host
