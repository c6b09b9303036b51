#include "cli/tune_command.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <iostream>
#include <optional>

#include "base/error.hpp"
#include "base/text.hpp"
#include "cli/disk_speed.hpp"
#include "cli/progress.hpp"
#include "engine/machine_profile.hpp"
#include "engine/planning.hpp"

namespace zr::host::cli {

namespace {

constexpr int64_t kLeastBytes = int64_t{32} << 20;
constexpr double kDriveBytes = 600e12;  // a typical endurance rating: bytes that can be written to a drive

template <class... Values>
std::string format(const char* text, Values... values) {
  char line[300];
  std::snprintf(line, sizeof line, text, values...);
  return line;
}
std::string gigabytes(double bytes) { return format(bytes < 1e8 ? "%.4f GB" : "%.2f GB", bytes * 1e-9); }

// The last of offload.tiers is the farthest from the device.
std::string farthest_tier() {
  const std::vector<std::string> tiers = config::Document::parse("", "zeroth tune", {}).tiers();
  return tiers.empty() ? "" : tiers.back();
}

plugin::Component tier_of_disk(const std::string& id) {
  const plugin::Component tier = plugin::Registry().load(plugin::Role::offload, id, "zeroth tune: --tier");
  for (const char* needed : {"path", "block_bytes", "depth"}) {
    const auto* end = tier.table->keys + tier.table->n_keys;
    if (std::find_if(tier.table->keys, end, [&](const zr_key* key) { return std::string(key->name) == needed; }) == end)
      fail_user("zeroth tune: tier '" + std::string(tier.table->id) + "' has no key '" + needed +
                "', so there is nothing to tune; name a disk tier with --tier");
  }
  return tier;
}

// The transfers of a step between all ranks and the disk.
struct Moved {
  std::string model, optimizer;
  int ranks = 1;
  double bytes = 0;  // bytes read, equal to bytes written
};

Moved moved_by(const ModelQuery& query, const std::string& tier) {
  std::vector<std::string> more;
  if (!query.document({}).tier_choices().front().given())
    more.push_back("offload.optimizer=" + config::toml_text(tier));
  const plugin::ResolvedJob job = query.resolved_job(more, query.ranks());
  Moved moved{query.model(), job.config.offload().optimizer->text, query.ranks(), 0};
  if (moved.ranks == 0) moved.ranks = job.config.job().ranks;
  const engine::Planner planner(job, query.parameters(), moved.ranks, query.ranks() == 0);
  constexpr int kFew = 16;  // the shards of more ranks differ by less than one norm block per bucket
  const int planned = moved.ranks <= kFew ? moved.ranks : 1;
  for (int rank = 0; rank < planned; ++rank)
    for (const plan::StateTile& tile : planner.plan(rank).placement.tiles)
      moved.bytes += static_cast<double>(tile.bytes) * moved.ranks / planned;
  return moved;
}

void print_table(const DiskTest& test, const DiskSpeed& speed, const engine::FileSystem& at, double seconds) {
  std::cout << "tier " << test.tier.table->id << " in " << test.path << " (file system " << at.mount
            << "): " << bytes_text(test.bytes) << ", " << duration_text(seconds) << ", "
            << gigabytes(static_cast<double>(speed.written)) << " written\n"
            << "     block  depth    read   write   mixed  GB/s (10^9 bytes/s; mixed: reads plus writes, half each)\n";
  const DiskPoint& best = speed.best();
  for (const DiskPoint& one : speed.points) {
    const bool large = one.block_bytes >= 1 << 20;
    std::cout << format(large ? "%6lld MiB  %5lld" : "%6lld KiB  %5lld",
                        static_cast<long long>(one.block_bytes >> (large ? 20 : 10)),
                        static_cast<long long>(one.depth));
    for (const double rate : {one.read, one.write, one.mixed})
      std::cout << (rate > 0 ? format("  %6.3f", rate * 1e-9) : "       -");
    std::cout << (&one == &best ? "  chosen\n" : "\n");
  }
  if (speed.used < test.bytes)
    std::cout << "only " << bytes_text(speed.used)
              << " of the file were used, because --seconds is too short to write all of it\n";
  std::cout << "chosen: the fewest bytes in flight (block x depth) within 5 % of the fastest mixed rate\n";
}

void print_step(const Moved& moved, const std::string& tier, double rate) {
  std::cout << "\n" << moved.model;
  if (moved.bytes == 0) {
    std::cout << "steps do not use the disk: offload.optimizer is \"" << moved.optimizer << "\"; set it to \"" << tier
              << "\" to use it\n";
    return;
  }
  const double seconds = 2 * moved.bytes / rate, steps = kDriveBytes / moved.bytes;
  std::cout << "optimizer phase of a step: " << moved.ranks << (moved.ranks == 1 ? " rank reads " : " ranks read ")
            << gigabytes(moved.bytes) << " and " << (moved.ranks == 1 ? "writes " : "write ") << gigabytes(moved.bytes)
            << " of states; " << gigabytes(2 * moved.bytes) << " / " << format("%.3f GB/s", rate * 1e-9)
            << " mixed = " << (seconds < 10 ? format("%.2f s", seconds) : duration_text(seconds)) << "\n"
            << "wear: " << gigabytes(moved.bytes) << " written per step; a drive rated for 600 TB lasts "
            << format("%.0f", std::floor(steps)) << " steps, or " << format("%.1f", steps * seconds / 86400)
            << " days of optimizer phases back to back\n";
}

}  // namespace

int tune(TuneOptions options, const std::filesystem::path& bin) {
  if (!std::filesystem::is_directory(options.path))
    fail_user("zeroth tune: --path " + options.path + ": no such folder; name a folder on the disk to measure");
  if (options.bytes < kLeastBytes)
    fail_user("zeroth tune: --bytes " + bytes_text(options.bytes) + ": must be at least " + bytes_text(kLeastBytes));
  const std::string path = std::filesystem::canonical(options.path).string();
  if (options.tier.empty()) options.tier = farthest_tier();
  DiskTest test{tier_of_disk(options.tier),
                path,
                {},
                options.bytes / kLeastBytes * kLeastBytes,
                static_cast<double>(options.seconds)};
  const std::string table = "offload." + std::string(test.tier.table->id) + ".";
  for (const std::string& one : options.model.overrides)
    if (one.rfind(table, 0) == 0) test.overrides.push_back(one);

  // Reports errors of the model before the measurement begins.
  options.model.overrides.push_back(table + "path=" + config::toml_text(path));
  const bool planned = options.model.any();
  Moved moved;
  if (planned) {
    ModelQuery query("zeroth tune", options.model);
    if (const int code = query.resolve(bin)) return code;
    moved = moved_by(query, options.tier);
  }

  const engine::FileSystem at = engine::file_system_of(path);
  const auto begin = std::chrono::steady_clock::now();
  DiskSpeed speed;
  {
    Progress progress("measuring " + path);
    speed = measure_disk(test, [&](int done, int all) { progress.at(done, all); });
  }
  print_table(test, speed, at, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  const DiskPoint& best = speed.best();
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::tm utc{};
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", ::gmtime_r(&now, &utc));
  engine::MachineProfile profile;
  profile.put({at, best.block_bytes, best.depth, best.read, best.write, best.mixed, date});
  profile.save();
  std::cout << "stored in " << profile.file() << "; jobs that do not set " << table << "block_bytes and depth use it\n";
  if (planned) print_step(moved, options.tier, best.mixed);
  return 0;
}

}  // namespace zr::host::cli
