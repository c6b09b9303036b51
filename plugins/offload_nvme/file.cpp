#include "file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace nvme {

namespace {
[[noreturn]] void fail(const std::string& what, int error, const std::string& remedy) {
  throw zr::PluginError(ZR_IO, "tier nvme: " + what + ": " + std::strerror(error) + "; " + remedy, error);
}
const char* const kElsewhere = "set offload.nvme.path to a folder on a disk that this user may write to";

std::unique_ptr<void, decltype(&std::free)> aligned(std::size_t bytes) {
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(kAlign, bytes), &std::free);
  if (!memory) throw std::bad_alloc();
  std::memset(memory.get(), 0, bytes);
  return memory;
}
}  // namespace

File::File(const zr::Host& host, const std::string& folder, Direct direct, Faults& faults) : folder_(folder) {
  struct stat about {};
  if (::stat(folder.c_str(), &about) != 0) fail("cannot access " + folder, errno, kElsewhere);
  if (!S_ISDIR(about.st_mode)) fail(folder + " is not a folder", ENOTDIR, kElsewhere);
  remove_abandoned(folder, [&](const std::string& left) {
    host.log(ZR_LOG_INFO, "tier nvme: removed " + left + ", left by a job that has ended");
  });
  make(host, folder, faults);
  try {
    try_out(host, folder, direct);
  } catch (...) {
    ::close(fd_);
    if (swap_) swap_->remove(path_);
    throw;
  }
}

File::~File() {
  ::close(fd_);
  if (swap_) swap_->remove(path_);
}

void File::make(const zr::Host& host, const std::string& folder, Faults& faults) {
  int error = faults.at("unnamed").error;
  if (!error) {
    fd_ = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    error = fd_ < 0 ? errno : 0;
  }
  name_ = folder + " (unnamed file)";
  if (!error) return;
  if (error != EOPNOTSUPP && error != EISDIR && error != ENOENT && error != EINVAL && error != EPERM)
    fail("cannot create a file in " + folder, error, kElsewhere);
  const auto* job = host.find<zr_job_service>();
  const std::string id = job && job->job_id[0] ? job->job_id : "pid-" + std::to_string(::getpid());
  swap_ = std::make_unique<SwapFolder>(folder, id);
  fd_ = swap_->create(job ? job->rank : 0, path_);
  name_ = path_;
}

// Some file systems accept O_DIRECT but then fail to read or write: write one block and read it back.
void File::try_out(const zr::Host& host, const std::string& folder, Direct direct) {
  const auto block = aligned(kAlign);
  const int flags = ::fcntl(fd_, F_GETFL);
  int error = 0;
  if (direct != Direct::no) {
    if (::fcntl(fd_, F_SETFL, flags | O_DIRECT) != 0) error = errno;
    if (!error && ::pwrite(fd_, block.get(), kAlign, 0) < 0) error = errno;
    if (!error && ::pread(fd_, block.get(), kAlign, 0) < 0) error = errno;
    direct_ = error == 0;
    if (error && error != EINVAL && error != EOPNOTSUPP && error != ENOTSUP)
      fail("cannot write and read a test block in " + folder, error, kElsewhere);
  }
  if (error && direct == Direct::yes)
    fail(folder + " does not support O_DIRECT (transfers that bypass the page cache)", error,
         "set offload.nvme.direct = \"auto\", or use a folder on another file system");
  if (error) {
    ::fcntl(fd_, F_SETFL, flags);
    host.log(ZR_LOG_INFO, "tier nvme: " + folder + " does not support O_DIRECT; transfers go through the page cache");
  }
  if (::ftruncate(fd_, 0) != 0) fail("cannot truncate the file in " + folder, errno, kElsewhere);
}

int File::write_zeros(uint64_t at, uint64_t bytes) const {
  constexpr uint64_t kMax = uint64_t{1} << 20;
  const auto zeros = aligned(kMax);
  for (uint64_t done = 0; done < bytes;) {
    const ssize_t n = ::pwrite(fd_, zeros.get(), std::min(kMax, bytes - done), static_cast<off_t>(at + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : ENOSPC;
    done += static_cast<uint64_t>(n);
  }
  return 0;
}

void File::reserve(uint64_t at, uint64_t bytes) {
  if (keeps_space_ && at + bytes <= size_) return;
  int error = allocate(0, at, bytes);
  if (error == EOPNOTSUPP || error == ENOSYS) error = write_zeros(at, bytes);
  if (!error) {
    size_ = std::max(size_, at + bytes);
    return;
  }
  release(at, bytes, at < size_ ? size_ : at);  // frees what a part of the reservation took
  fail("cannot reserve " + std::to_string(bytes) + " bytes in " + folder_ + ", " + std::to_string(free_bytes()) +
           " bytes are free",
       error,
       error == EFBIG ? "raise the limit of file sizes (ulimit -f)"
                      : "free disk space there, or set offload.nvme.path to a larger disk");
}

// If the disk fails here, the space stays in the file, and a later reserve() of the same bytes takes none.
void File::release(uint64_t at, uint64_t bytes, uint64_t end) {
  if (at >= end) {
    if (::ftruncate(fd_, static_cast<off_t>(end)) == 0) size_ = end;
    return;
  }
  if (bytes == 0 || keeps_space_) return;
  const int error = allocate(FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, bytes);
  keeps_space_ = error == EOPNOTSUPP || error == ENOSYS;
}

// fallocate(); returns its error, or 0.
int File::allocate(int mode, uint64_t at, uint64_t bytes) const {
  int error = 0;
  do error = ::fallocate(fd_, mode, static_cast<off_t>(at), static_cast<off_t>(bytes)) == 0 ? 0 : errno;
  while (error == EINTR);
  return error;
}

uint64_t File::free_bytes() const {
  struct statvfs disk {};
  return ::fstatvfs(fd_, &disk) == 0 ? uint64_t{disk.f_bavail} * disk.f_frsize : 0;
}

uint64_t File::device() const {
  struct stat about {};
  return ::fstat(fd_, &about) == 0 ? about.st_dev : 0;
}

}  // namespace nvme
