#include "cli/tune_command.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <iostream>

#include "base/cores.hpp"
#include "base/error.hpp"
#include "base/log.hpp"
#include "base/text.hpp"
#include "cli/disk_speed.hpp"
#include "cli/machine_load.hpp"
#include "cli/progress.hpp"
#include "job/machine_profile.hpp"
#include "job/offline_plan.hpp"

namespace zr::host::cli {

namespace {

constexpr int64_t kMinBytes = int64_t{32} << 20;
constexpr double kDriveBytes = 600e12;  // a typical endurance rating: bytes that can be written to a drive

std::string gigabytes(double bytes) {
  return bytes < 1e8 ? fmt::format("{:.4f} GB", bytes * 1e-9) : fmt::format("{:.2f} GB", bytes * 1e-9);
}

// The last of offload.tiers is the farthest from the device.
std::string farthest_tier() {
  const std::vector<std::string> tiers = config::Document::parse("", "zeroth tune", {}).tiers();
  return tiers.empty() ? "" : tiers.back();
}

plugin::Component tier_of_disk(const std::string& id) {
  const plugin::Component tier = plugin::Registry().load(plugin::Role::offload, id, "zeroth tune: --tier");
  for (const char* key_name : {"path", "block_bytes", "depth"}) {
    const auto* end = tier.table->keys + tier.table->n_keys;
    if (std::find_if(tier.table->keys, end, [&](const zr_key* key) { return std::string(key->name) == key_name; }) ==
        end)
      fail_user(fmt::format(
          "zeroth tune: tier '{}' has no key '{}', so there is nothing to tune; name a disk tier with --tier",
          tier.table->id, key_name));
  }
  return tier;
}

// The transfers of a step between all ranks and the disk.
struct StepTransfers {
  std::string model, optimizer;
  int ranks = 1;
  double bytes = 0;  // bytes read, equal to bytes written
};

StepTransfers transfers_of(const ModelQuery& query, const std::string& tier) {
  std::vector<std::string> extra_overrides;
  if (!query.document({}).tier_choices().front().given())
    extra_overrides.push_back("offload.optimizer=" + config::toml_text(tier));
  const plugin::ResolvedJob job = query.resolved_job(extra_overrides, query.ranks());
  StepTransfers transfers{query.model(), job.config.offload().optimizer->text, query.ranks(), 0};
  if (transfers.ranks == 0) transfers.ranks = job.config.job().ranks;
  const job::OfflinePlan offline(job, query.parameters(), transfers.ranks, query.hosts(transfers.ranks));
  constexpr int kMaxPlannedRanks = 16;  // the shards of more ranks differ by less than one norm block per bucket
  const int planned = transfers.ranks <= kMaxPlannedRanks ? transfers.ranks : 1;
  for (int rank = 0; rank < planned; ++rank)
    for (const plan::StateTile& tile : offline.plan(rank).placement.tiles)
      transfers.bytes += static_cast<double>(tile.bytes) * transfers.ranks / planned;
  return transfers;
}

void print_table(const DiskTest& test, const DiskSpeed& speed, const job::FileSystem& file_system, double seconds) {
  std::cout << "tier " << test.tier.table->id << " in " << test.path << " (file system " << file_system.mount
            << "): " << bytes_text(test.bytes) << ", " << duration_text(seconds) << ", "
            << gigabytes(static_cast<double>(speed.written)) << " written\n"
            << "     block  depth    read   write   mixed  GB/s (10^9 bytes/s; mixed: reads plus writes, half each)\n";
  const DiskPoint& best = speed.best();
  for (const DiskPoint& point : speed.points) {
    const bool large = point.block_bytes >= 1 << 20;
    std::cout << fmt::format("{:6} {}iB  {:5}", point.block_bytes >> (large ? 20 : 10), large ? 'M' : 'K', point.depth);
    for (const double rate : {point.read, point.write, point.mixed})
      std::cout << (rate > 0 ? fmt::format("  {:6.3f}", rate * 1e-9) : "       -");
    std::cout << (&point == &best ? "  chosen\n" : "\n");
  }
  if (speed.used < test.bytes)
    std::cout << "only " << bytes_text(speed.used)
              << " of the file were used, because --seconds is too short to write all of it\n";
  std::cout << "chosen: the fewest bytes in flight (block x depth) within 5 % of the fastest mixed rate\n";
}

void print_step(const StepTransfers& transfers, const std::string& tier, double rate) {
  std::cout << "\n" << transfers.model;
  if (transfers.bytes == 0) {
    std::cout << "steps do not use the disk: offload.optimizer is \"" << transfers.optimizer << "\"; set it to \""
              << tier << "\" to use it\n";
    return;
  }
  const double seconds = 2 * transfers.bytes / rate, steps = kDriveBytes / transfers.bytes;
  std::cout << "optimizer phase of a step: " << transfers.ranks
            << (transfers.ranks == 1 ? " rank reads " : " ranks read ") << gigabytes(transfers.bytes) << " and "
            << (transfers.ranks == 1 ? "writes " : "write ") << gigabytes(transfers.bytes) << " of states; "
            << gigabytes(2 * transfers.bytes) << " / " << fmt::format("{:.3f} GB/s", rate * 1e-9)
            << " mixed = " << (seconds < 10 ? fmt::format("{:.2f} s", seconds) : duration_text(seconds)) << "\n"
            << "wear: " << gigabytes(transfers.bytes) << " written per step; a drive rated for 600 TB lasts "
            << fmt::format("{:.0f}", std::floor(steps)) << " steps, or "
            << fmt::format("{:.1f}", steps * seconds / 86400) << " days of optimizer phases back to back\n";
}

std::string point_text(const job::DiskProfile& disk) {
  return fmt::format("{} KiB x {}, read {:.3f}, write {:.3f}, mixed {:.3f} GB/s, {}", disk.block_bytes >> 10,
                     disk.depth, disk.read * 1e-9, disk.write * 1e-9, disk.mixed * 1e-9, disk.date);
}

// Stores the measurement, with a warning if other processes may have slowed it.
void store(const job::FileSystem& file_system, const DiskPoint& best, const std::string& table,
           const std::string& disturbance) {
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &utc));
  job::MachineProfile profile;
  profile.put({file_system, best.block_bytes, best.depth, best.read, best.write, best.mixed, date, disturbance});
  profile.save();
  std::cout << "stored in " << profile.file() << "; jobs that do not set " << table << "block_bytes and depth use it\n";
  if (!disturbance.empty())
    log(ZR_LOG_WARN, fmt::format("during the measurement {}; measure again when the machine is idle, or remove the "
                                 "result: zeroth tune --forget {}",
                                 disturbance, shell_word(file_system.mount)));
}

}  // namespace

void list_measured_disks() {
  const job::MachineProfile profile;
  std::cout << profile.file() << (profile.disks().empty() ? ": no disks were measured\n" : ":\n");
  for (const job::DiskProfile& disk : profile.disks()) {
    std::cout << "  " << printable(disk.file_system.mount) << ": " << point_text(disk) << "\n";
    if (!disk.disturbance.empty()) std::cout << "    measured while " << printable(disk.disturbance) << "\n";
  }
}

void forget_measured_disk(const std::string& path) {
  job::MachineProfile profile;
  std::error_code error;
  const std::string mount = std::filesystem::exists(path, error) ? job::file_system_of(path).mount : path;
  if (!profile.forget(mount) && !profile.forget(path))
    fail_user(fmt::format(
        "zeroth tune: --forget {}: {} has no measurements of file system {}; `zeroth tune --list` lists them",
        printable(path), profile.file(), printable(mount)));
  profile.save();
  std::cout << "removed the measurements of " << printable(mount) << " from " << profile.file() << "\n";
}

int tune(TuneOptions options, const std::filesystem::path& bin) {
  if (!std::filesystem::is_directory(options.path))
    fail_user(
        fmt::format("zeroth tune: --path {}: no such folder; name a folder on the disk to measure", options.path));
  if (options.bytes < kMinBytes)
    fail_user(
        fmt::format("zeroth tune: --bytes {}: must be at least {}", bytes_text(options.bytes), bytes_text(kMinBytes)));
  const std::string path = std::filesystem::canonical(options.path).string();
  if (options.tier.empty()) options.tier = farthest_tier();
  DiskTest test{tier_of_disk(options.tier),
                path,
                {},
                options.bytes / kMinBytes * kMinBytes,
                static_cast<double>(options.seconds)};
  const std::string table = fmt::format("offload.{}.", test.tier.table->id);
  for (const std::string& override_text : options.model.overrides)
    if (override_text.rfind(table, 0) == 0) test.overrides.push_back(override_text);

  // Reports errors of the model before the measurement begins.
  options.model.overrides.push_back(fmt::format("{}path={}", table, config::toml_text(path)));
  const bool planned = options.model.any();
  StepTransfers transfers;
  if (planned) {
    ModelQuery query("zeroth tune", options.model);
    if (const int code = query.resolve(bin)) return code;
    transfers = transfers_of(query, options.tier);
  }

  const job::FileSystem file_system = job::file_system_of(path);
  const auto begin = std::chrono::steady_clock::now();
  const MachineLoad load = MachineLoad::now(file_system.device);
  DiskSpeed speed;
  {
    Progress progress("measuring " + path);
    speed = measure_disk(test, [&](int done, int total) { progress.show(done, total); });
  }
  print_table(test, speed, file_system,
              std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  store(file_system, speed.best(), table,
        disturbance_text(load, MachineLoad::now(file_system.device), usable_cores().affinity));
  if (planned) print_step(transfers, options.tier, speed.best().mixed);
  return 0;
}

}  // namespace zr::host::cli
