// The time from the end of backward to updated weights, 85 M parameters under zero2 on two ranks, with offloaded
// optimizer states. Host memory is compared with states on the device, and with the arithmetic alone;
// disk is compared with plain transfers of the same bytes. Then host memory on one rank with a second core for a helper
// thread. `bench_offload ROWS.json` starts its ranks itself; OFFLOAD_BENCH names the folder on disk (default:
// build/runs).
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "base/huge_page_memory.hpp"
#include "bench/memory_job.hpp"
#include "bench/ranks.hpp"
#include "bench/row.hpp"
#include "offload/tier.hpp"
#include "zr/ordered_reduce.hpp"

namespace {

using zr::bench::Job;
using zr::bench::Row;

void backward(Job& job) {
  job.session.begin_backward(1.0, 1.0);
  job.model.backward();
  job.session.end_backward();
}

// Populated memory in huge pages, as optimizer states have.
class Array {
 public:
  explicit Array(std::size_t n) : memory_(zr::host::allocate_huge_pages(static_cast<int64_t>(n * sizeof(float)))) {
    if (!memory_) throw std::bad_alloc();
    std::fill_n(data(), n, 1e-3f);
  }
  float* data() { return reinterpret_cast<float*>(memory_.get()); }

 private:
  zr::host::HugePageMemory memory_;
};
struct Arrays {
  explicit Arrays(std::size_t n) : p(n), g(n), m(n), s(n) {}
  Array p, g, m, s;
};

// Only the arithmetic of an update over its arrays.
__attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default"))) void arithmetic(
    float* __restrict p, const float* __restrict g, float* __restrict m, float* __restrict s, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    const float x = g[i] * 0.5f;
    m[i] = m[i] * 0.9f + x * 0.1f;
    s[i] = s[i] * 0.99f + (x * 0.01f) * x;
    p[i] = p[i] * 0.9999f - m[i] * 1e-6f / (__builtin_sqrtf(s[i]) + 1e-8f);
  }
}

// Rounds to nearest bfloat16.
__attribute__((optimize("O3"), target_clones("avx512f", "avx2", "default"))) void round(const float* __restrict from,
                                                                                        uint16_t* __restrict to,
                                                                                        std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, from + i, sizeof bits);
    to[i] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
}

// The arithmetic of an update on one thread, and the rounding of its 16-bit weights.
class Arithmetic {
 public:
  Arithmetic(std::size_t elements, bool bf16)
      : n_(elements), bf16_(bf16), arrays_(elements), weights_(bf16 ? elements / 2 + 1 : 1) {}
  double milliseconds(Job& job) {
    return job.timed([&] {
      for (std::size_t at = 0; at < n_; at += kRun) {
        const std::size_t n = std::min(kRun, n_ - at);
        arithmetic(arrays_.p.data() + at, arrays_.g.data() + at, arrays_.m.data() + at, arrays_.s.data() + at, n);
        if (!bf16_) continue;
        round(arrays_.p.data() + at, run_.data(), n);  // new weights, written past the cache as an optimizer does
        zr::copy_bytes(reinterpret_cast<uint16_t*>(weights_.data()) + at, run_.data(), static_cast<int64_t>(2 * n),
                       true);
      }
    });
  }

 private:
  static constexpr std::size_t kRun = 16 << 10;
  std::size_t n_;
  bool bf16_;
  Arrays arrays_;
  Array weights_;  // of 16 bits
  std::array<uint16_t, kRun> run_{};
};
constexpr const char* kAlone = "one thread's arithmetic";

double step_of(Job& job) {
  backward(job);
  return job.timed([&] { job.session.step(); });
}

// The row for weights of type `dtype`. Two ranks with one thread each.
std::vector<Row> in_memory(const std::string& toml, const std::string& row, const std::string& dtype) {
  std::vector<std::string> keys{"strategy=zero2", "train.dtype=" + dtype};
  Job device(toml, "offload_device", keys);
  keys.emplace_back("offload.optimizer=cpu");
  Job host(toml, "offload_cpu", keys);
  Arithmetic arithmetic_of(static_cast<std::size_t>(device.model.count() / 2), dtype != "fp32");
  std::vector<double> ours, theirs, alone;
  for (int round = -2; round < 15; ++round) {
    double there = 0, here = 0;
    for (const bool ours_now : {round % 2 == 0, round % 2 != 0})
      (ours_now ? here : there) = step_of(ours_now ? host : device);
    const double least = arithmetic_of.milliseconds(device);
    if (round < 0) continue;
    ours.push_back(here);
    theirs.push_back(there);
    alone.push_back(least);
  }
  return {zr::bench::compare(row, "ms", ours, "states on the device", theirs, 0.8),
          zr::bench::compare(row + "_arithmetic", "ms", ours, kAlone, alone, 0)};
}

// The same on one rank whose second thread has its own core, compared with one thread's arithmetic.
std::vector<Row> with_a_core_to_spare(const std::string& toml, const std::string& row, const std::string& dtype) {
  if (std::thread::hardware_concurrency() < 2) {
    std::printf("%s: skipped, because this machine has one core\n", row.c_str());
    return {};
  }
  Job host(toml, "offload_cpu", {"strategy=zero2", "train.dtype=" + dtype, "offload.optimizer=cpu", "job.threads=2"});
  Arithmetic arithmetic_of(static_cast<std::size_t>(host.model.count()), dtype != "fp32");
  std::vector<double> ours, alone;
  for (int round = -2; round < 15; ++round) {
    double least = 0, here = 0;
    for (const bool ours_now : {round % 2 == 0, round % 2 != 0}) {
      if (ours_now)
        here = step_of(host);
      else
        least = arithmetic_of.milliseconds(host);
    }
    if (round < 0) continue;
    ours.push_back(here);
    alone.push_back(least);
  }
  return {zr::bench::compare(row, "ms", ours, kAlone, alone, 0.9)};
}

// Transfers the same number of tiles of the same size in both directions, without computing.
class DiskAlone {
 public:
  DiskAlone(Job& job, const zr::host::plan::Placement& placement, int64_t buffers)
      : buffers_(buffers), placement_(placement), ledger_(), pool_(1), host_(ledger_, pool_) {
    const auto& setup = job.program.state()->setup();
    zr::host::comm::offer_async(host_);
    tier_ = std::make_unique<zr::host::offload::TierStore>(
        host_, std::make_unique<zr::host::plugin::Instance>(host_, setup.tiers.front(), setup.config, "offload.nvme"),
        1);
    const int64_t bytes = placement.tiles.back().offset + placement.tiles.back().bytes;
    slot_ = tier_->reserve(bytes, {{zr::host::MemoryKind::optimizer, "same bytes", bytes}});
    memory_ = zr::host::allocate_huge_pages(buffers_ * placement.largest_tile);
    std::memset(memory_.get(), 1, static_cast<std::size_t>(buffers_ * placement.largest_tile));
    tier_->register_memory(memory_.get(), buffers_ * placement.largest_tile);
    behind_.resize(static_cast<std::size_t>(buffers_));
    for (std::size_t i = 0; i < placement.tiles.size(); ++i) write(i);
  }
  ~DiskAlone() {
    behind_.clear();
    tier_->unregister_memory(memory_.get(), buffers_ * placement_.largest_tile);
  }
  // No transfer is in flight.
  void settle() {
    for (auto& one : behind_) one.wait();
  }
  // Ends in the same state as an update: with the same number of writes in flight.
  void run() {
    std::vector<zr::host::offload::Transfer> ahead(placement_.tiles.size());
    std::size_t started = 0;
    const auto read = [&] {
      const auto& tile = placement_.tiles[started];
      behind_[started % static_cast<std::size_t>(buffers_)].wait();
      ahead[started] = tier_->read(slot_, tile.offset, buffer(started), tile.bytes, "same bytes");
      ++started;
    };
    while (started < std::min(static_cast<std::size_t>(buffers_) - 1, ahead.size())) read();
    for (std::size_t i = 0; i < ahead.size(); ++i) {
      ahead[i].wait();
      write(i);
      if (started < ahead.size()) read();
    }
    const int64_t n = std::ssize(ahead);
    for (int64_t i = std::max<int64_t>(n - buffers_, 0); i < n - zr::host::plan::kTilesInFlight; ++i)
      behind_[static_cast<std::size_t>(i % buffers_)].wait();
  }

 private:
  char* buffer(std::size_t i) { return memory_.get() + static_cast<int64_t>(i) % buffers_ * placement_.largest_tile; }
  void write(std::size_t i) {
    const auto& tile = placement_.tiles[i];
    behind_[i % static_cast<std::size_t>(buffers_)] =
        tier_->write(slot_, tile.offset, buffer(i), tile.bytes, "same bytes");
  }
  const int64_t buffers_;
  const zr::host::plan::Placement& placement_;
  zr::host::Ledger ledger_;
  zr::host::ThreadPool pool_;
  zr::host::plugin::PluginHost host_;
  std::unique_ptr<zr::host::offload::TierStore> tier_;
  uint64_t slot_ = 0;
  zr::host::HugePageMemory memory_;
  std::vector<zr::host::offload::Transfer> behind_;
};

int64_t moved(const Job& job) {
  int64_t bytes = 0;
  for (const auto& tier : job.session.tiers())
    if (tier) bytes += tier->read_bytes() + tier->written_bytes();
  return bytes;
}

std::vector<Row> on_disk(const std::string& toml, const std::string& folder) {
  Job job(toml, "offload_nvme",
          {"strategy=zero2", "train.dtype=bf16", "offload.optimizer=nvme", "offload.nvme.path=" + folder});
  const zr::host::plan::Placement& placement = job.session.plan().placement;
  // With the same number of tiles in flight as the update, and with four times as many; the faster one counts.
  DiskAlone disk(job, placement, zr::host::plan::kTilesInFlight),
      deep(job, placement, 4 * zr::host::plan::kTilesInFlight);
  std::vector<double> ours, alone, bytes;
  std::chrono::steady_clock::duration rest{};
  for (int round = -2; round < 8; ++round) {
    double step = 0, probe = 0;
    const int64_t before = moved(job);
    for (const bool ours_now : {round % 2 == 0, round % 2 != 0}) {
      if (!ours_now) {  // the disk idles as long as before a step
        const auto alone_is = [&](DiskAlone& one) {
          one.settle();
          std::this_thread::sleep_for(rest);
          return job.timed([&] { one.run(); });
        };
        const double first = alone_is(disk);
        probe = std::min(first, alone_is(deep));
        continue;
      }
      const auto begin = std::chrono::steady_clock::now();
      backward(job);
      rest = std::chrono::steady_clock::now() - begin;
      step = job.timed([&] { job.session.step(); });
    }
    if (round < 0) continue;
    ours.push_back(step);
    alone.push_back(probe);
    const auto elements = static_cast<double>(job.session.plan().rank_plan.state_elements);
    bytes.push_back(static_cast<double>(moved(job) - before) / elements);
  }
  constexpr double kFormula = 24;  // master and two states, 4 bytes each, both ways
  double exact = 1;                // of the worst step; a deviation in either direction is an error
  for (const double moves : bytes) exact = std::min({exact, moves / kFormula, kFormula / moves});
  return {zr::bench::compare("offload_step_nvme", "ms", ours, "plain disk transfers", alone, 0.85),
          {"swap_bytes_per_param", zr::bench::median(bytes), "B", "formula", kFormula, exact, 0.9995}};
}

// Milliseconds of a step whose backward computes for `seconds`, over several steps in a row, because a step writes the
// last tiles of the one before.
double overlapped_step(Job& job, double seconds) {
  constexpr int kSteps = 4;
  const auto step = [&] {
    job.session.begin_backward(1.0, 1.0);
    job.model.backward(seconds);
    job.session.end_backward();
    job.session.step();
  };
  step();
  return job.timed([&] {
    for (int i = 0; i < kSteps; ++i) step();
  }) / kSteps;
}

// Keeps a core busy, without memory traffic.
class BusyCore {
 public:
  ~BusyCore() {
    ends_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> ends_{false};
  std::thread thread_{[this] {
    while (!ends_) {
    }
  }};
};

// Whole steps with an update during backward, on one rank with one thread and a core to spare. Backward computes `load`
// times as long as the disk, or the update, needs alone: this is the lower bound of the step. Buckets are small,
// because the update of the last one begins when backward has ended. A second row has the disk's time while a core
// computes: on virtual machines the disk's emulation needs time of the same processors.
std::vector<Row> overlapping(const std::string& toml, const std::string& row, const std::string& tier,
                             const std::string& folder, double load, double target) {
  if (std::thread::hardware_concurrency() < 2) {
    std::printf("%s: skipped, because this machine has one core\n", row.c_str());
    return {};
  }
  Job job(toml, row,
          {"strategy=zero2", "strategy.zero2.bucket_bytes=2MiB", "train.dtype=bf16", "offload.optimizer=" + tier,
           "train.nonfinite=stop", "train.gradient_clipping=0", "offload.nvme.path=" + folder});
  std::optional<DiskAlone> disk;
  if (tier == "nvme") disk.emplace(job, job.session.plan().placement, 4 * zr::host::plan::kTilesInFlight);
  const auto disk_alone = [&] {
    disk->settle();
    return job.timed([&] {
      disk->run();
      disk->settle();
    });
  };
  Job after(toml, row + "_after",
            {"strategy=zero2", "train.dtype=bf16", "offload.optimizer=cpu", "offload.overlap=false",
             "train.gradient_clipping=0"});
  std::vector<double> ours, bound, bound_of_busy;
  for (int round = -1; round < 5; ++round) {
    double alone = 0, busy = 0;
    if (disk) {
      alone = disk_alone();
      const BusyCore core;
      busy = disk_alone();
    } else {
      step_of(after);
      alone = step_of(after);
    }
    const double step = overlapped_step(job, load * alone / 1e3);
    if (round < 0) continue;
    ours.push_back(step);
    bound.push_back(load * alone);
    bound_of_busy.push_back(std::max(load * alone, busy));
  }
  std::vector<Row> rows{zr::bench::compare(row, "ms", ours, "the longer of compute and " + tier, bound, target)};
  if (disk) rows.push_back(zr::bench::compare(row, "ms", ours, "nvme while a core computes", bound_of_busy, target));
  return rows;
}

void measure(const std::string& toml, const std::string& file, int world) {
  const char* named = std::getenv("OFFLOAD_BENCH");
  const std::string folder = named ? named : ZR_BUILD_DIR "/runs/swap";
  std::filesystem::create_directories(folder);
  std::vector<Row> table;
  const auto add = [&](const std::vector<Row>& rows) { table.insert(table.end(), rows.begin(), rows.end()); };
  if (world == 2) {
    add(in_memory(toml, "offload_step_cpu", "bf16"));
    add(in_memory(toml, "offload_step_cpu_fp32", "fp32"));
    add(on_disk(toml, folder));
  } else {
    add(with_a_core_to_spare(toml, "offload_step_cpu_spare_core", "bf16"));
    add(with_a_core_to_spare(toml, "offload_step_cpu_fp32_spare_core", "fp32"));
    add(overlapping(toml, "overlap_cpu", "cpu", folder, 1, 1 / 1.10));
    add(overlapping(toml, "overlap_cpu_long_backward", "cpu", folder, 2, 1 / 1.10));
    add(overlapping(toml, "overlap_nvme", "nvme", folder, 1, 1 / 1.15));
  }
  if (std::string(std::getenv("ZR_RANK")) != "0") return;
  for (const Row& row : table) zr::bench::print(row);
  zr::bench::append(file, table);
}

}  // namespace

int main(int argc, char** argv) { return zr::bench::on_ranks(argc, argv, {2, 1}, measure); }
