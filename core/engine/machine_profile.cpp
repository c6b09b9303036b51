#include "engine/machine_profile.hpp"

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

namespace zr::host::engine {

namespace fs = std::filesystem;

namespace {
constexpr int kFormat = 1;

void warn_once(const std::string& file, const std::string& why) {
  static Mutex mutex;
  static std::set<std::string> reported ZR_GUARDED_BY(mutex);
  const MutexLock lock(mutex);
  if (reported.insert(file).second)
    log(ZR_LOG_WARN,
        file + ": not a valid machine profile (" + why + "); ignoring it; remove the file, or run `zeroth tune` again");
}

std::vector<DiskProfile> parsed(const std::string& text) {
  const auto json = nlohmann::json::parse(text);
  if (json.at("format") != kFormat) throw std::invalid_argument("unknown format");
  std::vector<DiskProfile> disks;
  for (const auto& one : json.at("disks")) {
    DiskProfile disk;
    one.at("mount").get_to(disk.at.mount);
    one.at("device").get_to(disk.at.device);
    one.at("block_bytes").get_to(disk.block_bytes);
    one.at("depth").get_to(disk.depth);
    one.at("read").get_to(disk.read);
    one.at("write").get_to(disk.write);
    one.at("mixed").get_to(disk.mixed);
    one.at("date").get_to(disk.date);
    if (disk.block_bytes < 1 || disk.depth < 1 || disk.depth > INT32_MAX)
      throw std::invalid_argument("invalid block_bytes or depth of " + disk.at.mount);
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
    fail_user(path + ": cannot be accessed: " + (error ? error.message() : std::strerror(errno)));
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
  std::error_code error;
  if (file_.empty() || !fs::exists(file_, error)) return;
  try {
    disks_ = parsed(read_file(file_));
  } catch (const std::exception& broken) {
    warn_once(file_, broken.what());
  }
}

const DiskProfile* MachineProfile::find(const FileSystem& at) const {
  for (const DiskProfile& disk : disks_)
    if (disk.at == at) return &disk;
  return nullptr;
}

void MachineProfile::put(DiskProfile one) {
  std::erase_if(disks_, [&](const DiskProfile& disk) { return disk.at.mount == one.at.mount; });
  disks_.push_back(std::move(one));
}

void MachineProfile::save() const {
  if (file_.empty())
    fail_environment(
        "cannot save the machine profile: neither XDG_CACHE_HOME nor HOME is an absolute path; set "
        "ZR_MACHINE_PROFILE=FILE");
  auto json = nlohmann::ordered_json{{"format", kFormat}, {"disks", nlohmann::ordered_json::array()}};
  for (const DiskProfile& disk : disks_)
    json["disks"].push_back({{"mount", disk.at.mount},
                             {"device", disk.at.device},
                             {"block_bytes", disk.block_bytes},
                             {"depth", disk.depth},
                             {"read", disk.read},
                             {"write", disk.write},
                             {"mixed", disk.mixed},
                             {"date", disk.date}});
  make_folder(fs::path(file_).parent_path().string());
  write_file(file_, json.dump(1) + "\n");
}

void offer_machine_profile(plugin::PluginHost& host) { host.offer("zr.host.machine/1", &kService); }

}  // namespace zr::host::engine
