#include "job/machine_profile.hpp"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "base/error.hpp"
#include "base/file.hpp"
#include "base/log.hpp"
#include "zr/mutex.hpp"

namespace zr::host::job {

namespace fs = std::filesystem;

namespace {
constexpr int kFormat = 1;

void warn_once(const std::string& file, const std::string& why) {
  static Mutex mutex;
  static auto* reported ZR_GUARDED_BY(mutex) = new std::set<std::string>;  // never destroyed
  const MutexLock lock(mutex);
  if (reported->insert(file).second)
    log(ZR_LOG_WARN,
        fmt::format("{}: not a valid machine profile ({}); ignoring it; remove the file, or run `zeroth tune` again",
                    file, why));
}

std::vector<DiskProfile> parsed(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  if (json.at("format") != kFormat) throw std::invalid_argument("unknown format");
  std::vector<DiskProfile> disks;
  for (const auto& entry : json.at("disks")) {
    DiskProfile disk;
    entry.at("mount").get_to(disk.file_system.mount);
    entry.at("device").get_to(disk.file_system.device);
    entry.at("block_bytes").get_to(disk.block_bytes);
    entry.at("depth").get_to(disk.depth);
    entry.at("read").get_to(disk.read);
    entry.at("write").get_to(disk.write);
    entry.at("mixed").get_to(disk.mixed);
    entry.at("date").get_to(disk.date);
    disk.disturbance = entry.value("disturbance", "");
    if (disk.block_bytes < 1 || disk.depth < 1 || disk.depth > INT32_MAX)
      throw std::invalid_argument("invalid block_bytes or depth of " + disk.file_system.mount);
    disks.push_back(std::move(disk));
  }
  return disks;
}

zr_code disk(const zr_host*, const char* path, uint64_t* block_bytes, uint32_t* depth) try {
  const MachineProfile profile;
  const DiskProfile* known = profile.find(file_system_of(path));
  if (!known) return ZR_UNSUPPORTED;
  *block_bytes = static_cast<uint64_t>(known->block_bytes);
  *depth = static_cast<uint32_t>(known->depth);
  return ZR_OK;
} catch (const std::exception&) {  // the path does not exist: the plug-in that opens it reports that
  return ZR_UNSUPPORTED;
}

const zr_machine_service kService{sizeof(zr_machine_service), 0, disk};
}  // namespace

FileSystem file_system_of(const std::string& path) {
  std::error_code error;
  fs::path at = fs::canonical(path, error);
  struct stat about {};
  if (error || ::stat(at.c_str(), &about) != 0)
    fail_user(fmt::format("{}: cannot be accessed: {}", path, error ? error.message() : std::strerror(errno)));
  const dev_t device = about.st_dev;
  while (at.has_relative_path() && ::stat(at.parent_path().c_str(), &about) == 0 && about.st_dev == device)
    at = at.parent_path();
  return {at.string(), device};
}

std::string MachineProfile::default_file() {
  if (const char* named = std::getenv("ZR_MACHINE_PROFILE"); named && *named) return fs::absolute(named).string();
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  if (cache && *cache == '/') return (fs::path(cache) / "zeroth/machine.json").string();
  return home && *home == '/' ? (fs::path(home) / ".cache/zeroth/machine.json").string() : "";
}

MachineProfile::MachineProfile(std::string file) : file_(std::move(file)) {
  if (file_.empty() || !path_exists(file_)) return;
  try {
    disks_ = parsed(read_file(file_));
  } catch (const std::exception& broken) {
    warn_once(file_, broken.what());
  }
}

const DiskProfile* MachineProfile::find(const FileSystem& file_system) const {
  for (const DiskProfile& disk : disks_)
    if (disk.file_system == file_system) return &disk;
  return nullptr;
}

bool MachineProfile::forget(const std::string& mount) {
  return std::erase_if(disks_, [&](const DiskProfile& disk) { return disk.file_system.mount == mount; }) > 0;
}

void MachineProfile::put(DiskProfile profile) {
  forget(profile.file_system.mount);
  disks_.push_back(std::move(profile));
}

void MachineProfile::save() const {
  if (file_.empty())
    fail_environment(
        "cannot save the machine profile: neither XDG_CACHE_HOME nor HOME is an absolute path; set "
        "ZR_MACHINE_PROFILE=FILE");
  auto json = nlohmann::ordered_json{{"format", kFormat}, {"disks", nlohmann::ordered_json::array()}};
  for (const DiskProfile& disk : disks_) {
    auto entry = nlohmann::ordered_json{{"mount", disk.file_system.mount},
                                        {"device", disk.file_system.device},
                                        {"block_bytes", disk.block_bytes},
                                        {"depth", disk.depth},
                                        {"read", disk.read},
                                        {"write", disk.write},
                                        {"mixed", disk.mixed},
                                        {"date", disk.date}};
    if (!disk.disturbance.empty()) entry["disturbance"] = disk.disturbance;
    json["disks"].push_back(std::move(entry));
  }
  make_folder(fs::path(file_).parent_path().string());
  write_file(file_, json.dump(1) + "\n");
}

void offer_machine_profile(plugin::PluginHost& host) { host.offer("zr.host.machine/1", &kService); }

}  // namespace zr::host::job
