// The tier "nvme": allocations are ranges of one unnamed file per folder.
#include <filesystem>
#include <sstream>
#include <unordered_map>

#include "io_engine.hpp"
#include "zr/mutex.hpp"
#include "zr/offload.hpp"
#include "zr/round_up.hpp"

namespace {

using nvme::kAlign;

// The folders of "/a:/b", as absolute paths.
std::vector<std::string> folders_of(const std::string& paths) {
  std::vector<std::string> folders;
  std::istringstream in(paths);
  for (std::string folder; std::getline(in, folder, ':');) {
    if (folder.empty())
      throw zr::PluginError(ZR_INVALID, "offload.nvme.path = \"" + paths + "\" has an empty folder; write \"/a:/b\"");
    folders.push_back(std::filesystem::absolute(folder).lexically_normal().string());
  }
  if (folders.empty())
    throw zr::PluginError(ZR_INVALID, "offload.nvme.path is empty; set it to a folder on a disk, or \"/a:/b\"");
  return folders;
}

// A name with ':' is several folders, which the user may not know.
void check_parts(const std::vector<std::string>& folders) {
  std::error_code error;
  for (const std::string& folder : folders)
    if (folders.size() > 1 && !std::filesystem::is_directory(folder, error))
      throw zr::PluginError(ZR_INVALID, "offload.nvme.path names " + std::to_string(folders.size()) +
                                            " folders, because ':' separates them, and '" + folder +
                                            "' does not exist; create it, correct the path, or give a folder with ':' "
                                            "in its name another one, such as a symbolic link");
}

constexpr uint64_t kLargestBlock = uint64_t{1} << 30;
constexpr uint32_t kMaxDepth = 256;

class Nvme : public zr::Offload<Nvme> {
 public:
  static constexpr const char* description = "files on NVMe disks";
  static constexpr const char* license = "Apache-2.0";
  static constexpr zr_key keys[] = {
      zr::key_text("path", nullptr, nullptr, "folder on the disk; several, separated by ':', are striped"),
      zr::key_text("engine", "\"auto\"", "auto|uring|threads", "io_uring, or threads if io_uring is not permitted"),
      zr::key_bool("checksum", "true", "compare checksums of the bytes read with those of the bytes written"),
      zr::key_bytes("block_bytes", "\"0B\"", 0, kLargestBlock,
                    "largest transfer, and stripe size per folder; 0: as measured by `zeroth tune`, else 1MiB"),
      zr::key_int("depth", "0", 0, kMaxDepth, "transfers in flight at a time; 0: as measured by `zeroth tune`, else 8"),
      zr::key_text("direct", "\"auto\"", "auto|true|false", "bypass the page cache (O_DIRECT)")};
  Nvme(const zr::Config& config, const zr::Host& host)
      : host_(host),
        folders_(folders_of(config.text("path"))),
        engine_name_(config.text("engine")),
        checksum_(config.boolean("checksum")),
        transfer_size_(transfer_size_of(config)),
        depth_(transfer_size_.depth),
        direct_(config.text("direct")),
        stripes_{transfer_size_.block_bytes, static_cast<uint32_t>(folders_.size())} {
    if (stripes_.block_bytes % kAlign != 0)
      throw zr::PluginError(ZR_INVALID, "offload.nvme.block_bytes = " + std::to_string(stripes_.block_bytes) +
                                            " is not a multiple of 4096; write \"1MiB\"");
  }
  ~Nvme() {
    engine_.reset();
    const zr::MutexLock lock(mutex_);
    for (const auto& [id, allocation] : allocations_) account(-checksum_bytes(*allocation));
  }

  void open() {
    if (transfers_) throw zr::PluginError(ZR_STATE, "tier nvme is already open");
    const auto direct = direct_ == "auto"   ? nvme::Direct::automatic
                        : direct_ == "true" ? nvme::Direct::yes
                                            : nvme::Direct::no;
    check_parts(folders_);
    std::vector<std::unique_ptr<nvme::File>> files;
    for (const std::string& folder : folders_)
      files.push_back(std::make_unique<nvme::File>(host_, folder, direct, faults_));
    files_ = std::move(files);
    {
      const zr::MutexLock lock(mutex_);
      ranges_.resize(files_.size());
    }
    auto transfers = std::make_unique<nvme::Transfers>(files_, stripes_, checksum_, faults_);
    engine_ = make_engine(*transfers);
    transfers_ = std::move(transfers);
    if (transfer_size_.measured)
      host_.log(ZR_LOG_INFO, "tier nvme: blocks of " + std::to_string(transfer_size_.block_bytes / 1024) + " KiB, " +
                                 std::to_string(depth_) + " in flight, the fastest setting that `zeroth tune` " +
                                 "measured for " + folders_.front());
  }

  zr_offload_caps caps() const {
    zr_offload_caps caps{};
    caps.flags = ZR_TIER_ASYNC;
    caps.capacity = capacity();
    caps.io_align = kAlign;
    caps.io_bytes = stripes_.block_bytes;
    caps.io_depth = depth_;
    caps.device_types = uint64_t{1} << 1;
    caps.host_bytes_per_mib = checksum_ ? (uint64_t{1} << 20) / kAlign * sizeof(uint32_t) : 0;
    return caps;
  }

  uint64_t reserve(uint64_t bytes, const char*) {
    if (!transfers_) throw zr::PluginError(ZR_STATE, "tier nvme is not open");
    if (bytes > uint64_t{1} << 56)
      throw zr::PluginError(ZR_IO, "cannot reserve " + std::to_string(bytes) + " bytes, more than any disk has");
    bytes = zr::round_up(bytes, kAlign);
    auto allocation = std::make_unique<nvme::Allocation>(bytes, checksum_ ? bytes / kAlign : 0);
    const zr::MutexLock lock(mutex_);
    for (uint32_t i = 0; i < files_.size(); ++i) {
      const uint64_t part = stripes_.bytes_in(i, bytes);
      allocation->at.push_back(ranges_[i].take(part));
      if (part > 0) try {
          files_[i]->reserve(allocation->at.back(), part);
        } catch (...) {
          release_ranges_locked(*allocation);
          throw;
        }
    }
    account(checksum_bytes(*allocation));
    allocations_[++last_] = std::move(allocation);
    return last_;
  }
  void release(uint64_t id) noexcept {
    const zr::MutexLock lock(mutex_);
    const auto found = allocations_.find(id);
    if (found == allocations_.end())
      return host_.log(ZR_LOG_ERROR, "tier nvme: release of unknown allocation " + std::to_string(id));
    account(-checksum_bytes(*found->second));
    release_ranges_locked(*found->second);
    allocations_.erase(found);
  }

  void write(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done) {
    start(transfers, n, stream, done, true);
  }
  void read(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done) {
    start(transfers, n, stream, done, false);
  }

  void reg(const zr_view& memory) { engine_->reg(memory); }
  void unreg(const zr_view& memory) noexcept { engine_->unreg(memory); }

 private:
  struct TransferSize {
    uint64_t block_bytes;
    uint32_t depth;
    bool measured = false;
  };
  // A value that is not set comes from the machine profile of the first folder's file system, else it is the default.
  TransferSize transfer_size_of(const zr::Config& config) const {
    TransferSize size{static_cast<uint64_t>(config.integer("block_bytes")),
                      static_cast<uint32_t>(config.integer("depth"))};
    if (size.block_bytes && size.depth) return size;
    uint64_t block_bytes = 0;
    uint32_t depth = 0;
    const auto* machine = host_.find<zr_machine_service>();
    size.measured = machine && machine->disk(host_.abi(), folders_.front().c_str(), &block_bytes, &depth) == ZR_OK &&
                    block_bytes >= kAlign && block_bytes <= kLargestBlock && block_bytes % kAlign == 0 && depth >= 1 &&
                    depth <= kMaxDepth;
    if (!size.block_bytes) size.block_bytes = size.measured ? block_bytes : 1 << 20;
    if (!size.depth) size.depth = size.measured ? depth : 8;
    return size;
  }

  std::unique_ptr<nvme::IoEngine> make_engine(nvme::Transfers& transfers) {
    if (engine_name_ == "threads") return nvme::make_threads(transfers, files_, depth_);
    try {
      return nvme::make_uring(transfers, files_, depth_, faults_);
    } catch (const zr::PluginError& error) {
      if (engine_name_ == "uring") throw;
      host_.log(ZR_LOG_INFO, std::string("tier nvme: ") + error.what() + "; using threads instead");
    }
    return nvme::make_threads(transfers, files_, depth_);
  }

  // If k of the n folders are on one disk, the disk stores k/n of all bytes.
  uint64_t capacity() const {
    const zr::MutexLock lock(mutex_);
    struct Disk {
      uint64_t bytes = 0, folders = 0;
    };
    std::unordered_map<uint64_t, Disk> disks;
    for (std::size_t i = 0; i < files_.size(); ++i) {
      Disk& disk = disks[files_[i]->device()];
      if (disk.folders++ == 0) disk.bytes = files_[i]->free_bytes();
      disk.bytes += files_[i]->keeps_space() ? ranges_[i].end() : ranges_[i].in_use();
    }
    uint64_t smallest = ~uint64_t{0};
    for (const auto& [id, disk] : disks) smallest = std::min(smallest, disk.bytes / disk.folders * files_.size());
    return files_.empty() ? 0 : smallest / kAlign * kAlign;
  }

  // Also gives the disk space back.
  void release_ranges_locked(const nvme::Allocation& allocation) ZR_REQUIRES(mutex_) {
    for (uint32_t i = 0; i < allocation.at.size(); ++i) {
      const uint64_t part = stripes_.bytes_in(i, allocation.bytes);
      ranges_[i].release(allocation.at[i], part);
      if (part > 0) files_[i]->release(allocation.at[i], part, ranges_[i].end());
    }
  }
  static int64_t checksum_bytes(const nvme::Allocation& allocation) {
    return static_cast<int64_t>(allocation.checksums.size() * sizeof(uint32_t));
  }
  void account(int64_t bytes) const {
    const auto* memory = host_.find<zr_memory_service>();
    if (memory && bytes != 0) memory->account(host_.abi(), "other: checksums of nvme", bytes);
  }

  void start(const zr_transfer* transfers, uint32_t n, zr_stream* stream, zr_done* done, bool writes) {
    if (!transfers_) throw zr::PluginError(ZR_STATE, "tier nvme is not open");
    if (stream)
      throw zr::PluginError(ZR_UNSUPPORTED, "tier nvme does not support streams; wait for the stream, and pass none");
    auto request = std::make_shared<nvme::Request>();
    request->writes = writes;
    request->transfers.assign(transfers, transfers + n);
    {
      const zr::MutexLock lock(mutex_);
      for (uint32_t i = 0; i < n; ++i) request->allocations.push_back(checked_locked(transfers[i], i));
    }
    request->done = zr::Done::retained(host_, done);
    transfers_->push(request);
  }
  // The allocation of a transfer. Throws unless the transfer consists of full 4096-byte blocks within the allocation.
  nvme::Allocation* checked_locked(const zr_transfer& transfer, uint32_t index) const ZR_REQUIRES(mutex_) {
    const auto reject = [&](const std::string& what) {
      throw zr::PluginError(ZR_INVALID, "tier nvme: transfer " + std::to_string(index) + " " + what, index);
    };
    const auto allocation = allocations_.find(transfer.allocation);
    if (allocation == allocations_.end())
      reject("refers to allocation " + std::to_string(transfer.allocation) + ", which is not reserved");
    if (transfer.memory.dtype != ZR_U8 || transfer.memory.device.type != 1)
      reject("must be a view of bytes in CPU memory");
    const auto bytes = static_cast<uint64_t>(transfer.memory.count),
               address = reinterpret_cast<uint64_t>(transfer.memory.data);
    if (transfer.offset % kAlign || bytes % kAlign || address % kAlign)
      reject("(" + std::to_string(bytes) + " bytes at byte " + std::to_string(transfer.offset) +
             (address % kAlign ? ", at an unaligned address" : "") +
             "): offset, length and address must be multiples of 4096; round up, allocations have space for it");
    const uint64_t size = allocation->second->bytes;
    if (transfer.offset > size || bytes > size - transfer.offset)
      reject("(" + std::to_string(bytes) + " bytes at byte " + std::to_string(transfer.offset) +
             ") exceeds its allocation of " + std::to_string(size) + " bytes");
    return allocation->second.get();
  }

  const zr::Host host_;
  const std::vector<std::string> folders_;
  const std::string engine_name_;
  const bool checksum_;
  const TransferSize transfer_size_;
  const uint32_t depth_;
  const std::string direct_;
  const nvme::Stripes stripes_;
  nvme::Faults faults_{host_};
  std::vector<std::unique_ptr<nvme::File>> files_;
  std::unique_ptr<nvme::Transfers> transfers_;
  std::unique_ptr<nvme::IoEngine> engine_;  // destroyed before the members above, to which it refers
  mutable zr::Mutex mutex_;
  std::vector<nvme::Ranges> ranges_ ZR_GUARDED_BY(mutex_);  // by file
  std::unordered_map<uint64_t, std::unique_ptr<nvme::Allocation>> allocations_ ZR_GUARDED_BY(mutex_);
  uint64_t last_ ZR_GUARDED_BY(mutex_) = 0;  // id of the last allocation
};

}  // namespace

ZR_OFFLOAD(Nvme, "nvme", "zeroth", "1.0.0");
