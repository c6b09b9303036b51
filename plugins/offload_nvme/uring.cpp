// io_uring: one thread takes pieces, submits them to the kernel, with registered files and memory, and checks them.
#include <liburing.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <map>
#include <thread>

#include "io_engine.hpp"
#include "zr/mutex.hpp"

namespace nvme {

namespace {

constexpr uint64_t kPushEvent = ~uint64_t{0};               // user_data of the event that signals a push
constexpr uint32_t kMaxRegistered = 4096;                   // entries of the kernel's table
constexpr uint64_t kLargestRegistered = uint64_t{1} << 30;  // the kernel's limit for one entry

class Uring final : public IoEngine {
 public:
  Uring(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files, uint32_t depth, Faults& faults)
      : transfers_(transfers), files_(files), depth_(depth), pieces_(3 * depth), results_(3 * depth) {
    set_up(depth, faults.at("uring").error);
    for (uint32_t i = 0; i < pieces_.size(); ++i) idle_.push_back(i);
    transfers_.on_push([this] { static_cast<void>(::eventfd_write(push_event_, 1)); });
    const BlockedSignals none;
    thread_ = std::thread([this] { run(); });
  }
  ~Uring() override {
    transfers_.stop();
    thread_.join();
    close();
  }

  void reg(const zr_view& memory) override {
    const zr::MutexLock lock(mutex_);
    const auto count = static_cast<uint64_t>(memory.count);
    if (!can_register_) throw zr::PluginError(ZR_UNSUPPORTED, "this kernel cannot register single memory ranges");
    for (uint64_t at = 0; at < count; at += kLargestRegistered) {
      const uint64_t bytes = std::min(kLargestRegistered, count - at);
      char* data = static_cast<char*>(memory.data) + at;
      const int error = registered_.count(data) ? EEXIST : add_locked(data, bytes);
      if (!error) continue;
      drop_locked(memory.data, at);
      throw zr::PluginError(ZR_NOMEM,
                            "tier nvme: cannot register " + std::to_string(count) + " bytes with the kernel: " +
                                std::strerror(error) + "; their transfers are slower (ulimit -l limits locked memory)",
                            error);
    }
  }
  void unreg(const zr_view& memory) override {
    const zr::MutexLock lock(mutex_);
    drop_locked(memory.data, static_cast<uint64_t>(memory.count));
  }

 private:
  struct Registered {
    uint64_t bytes;
    uint32_t entry;
  };

  [[noreturn]] void reject(int error) {
    close();
    throw zr::PluginError(ZR_UNSUPPORTED,
                          std::string("cannot use io_uring: ") + std::strerror(error) +
                              "; permit it (kernel.io_uring_disabled, the container's seccomp profile, memory), or set "
                              "offload.nvme.engine = \"threads\"",
                          error);
  }
  void close() {
    if (ready_) ::io_uring_queue_exit(&ring_);
    if (push_event_ >= 0) ::close(push_event_);
    ready_ = false;
    push_event_ = -1;
  }
  // A sandbox may permit some of the system calls and not others: a no-op entry tests all of them.
  void set_up(uint32_t depth, int injected) {
    if (injected) reject(injected);
    if (const int result = ::io_uring_queue_init(depth + 2, &ring_, 0); result < 0) reject(-result);
    ready_ = true;
    push_event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (push_event_ < 0) reject(errno);
    io_uring_prep_nop(::io_uring_get_sqe(&ring_));
    io_uring_cqe* cqe = nullptr;
    if (const int result = ::io_uring_submit_and_wait(&ring_, 1); result < 0) reject(-result);
    if (const int result = io_uring_wait_cqe(&ring_, &cqe); result < 0) reject(-result);
    io_uring_cqe_seen(&ring_, cqe);
    std::vector<int> fds;
    for (const auto& file : files_) fds.push_back(file->fd());
    fixed_files_ = ::io_uring_register_files(&ring_, fds.data(), static_cast<unsigned>(fds.size())) == 0;
    can_register_ = ::io_uring_register_buffers_sparse(&ring_, kMaxRegistered) == 0;
    const zr::MutexLock lock(mutex_);
    for (uint32_t i = kMaxRegistered; i > 0; --i) entries_.push_back(i - 1);
  }

  int add_locked(char* data, uint64_t bytes) ZR_REQUIRES(mutex_) {
    if (entries_.empty()) return ENOMEM;
    const iovec memory{data, bytes};
    const __u64 tag = 0;
    const int result = ::io_uring_register_buffers_update_tag(&ring_, entries_.back(), &memory, &tag, 1);
    if (result < 0) return -result;
    registered_[data] = {bytes, entries_.back()};
    entries_.pop_back();
    return 0;
  }
  void drop_locked(void* begin, uint64_t bytes) ZR_REQUIRES(mutex_) {
    char* data = static_cast<char*>(begin);
    for (auto range = registered_.lower_bound(data); range != registered_.end() && range->first < data + bytes;) {
      const iovec none{nullptr, 0};
      const __u64 tag = 0;
      ::io_uring_register_buffers_update_tag(&ring_, range->second.entry, &none, &tag, 1);
      entries_.push_back(range->second.entry);
      range = registered_.erase(range);
    }
  }
  // The table entry that contains all of these bytes, or -1.
  int entry_of(char* data, uint64_t bytes) {
    const zr::MutexLock lock(mutex_);
    auto range = registered_.upper_bound(data);
    if (range == registered_.begin()) return -1;
    --range;
    return data + bytes <= range->first + range->second.bytes ? static_cast<int>(range->second.entry) : -1;
  }

  // Keeps the disk busy first: computes and checks checksums while other pieces are in flight.
  void run() {
    listen();
    for (;;) {
      while (in_flight_ < depth_ && (!prepared_.empty() || prepare())) {
        issue(prepared_.front());
        prepared_.pop_front();
      }
      if (!returned_.empty()) {
        const uint32_t i = returned_.front();
        returned_.pop_front();
        if (transfers_.advance(pieces_[i], results_[i])) {
          prepared_.push_front(i);
        } else {
          idle_.push_back(i);
        }
      } else if (prepared_.size() >= depth_ || !prepare()) {
        if (in_flight_ == 0 && transfers_.stopped()) return;
        const int result = ::io_uring_submit_and_wait(&ring_, 1);
        // Another error means that the kernel has no memory at the moment.
        if (result < 0 && result != -EINTR) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      reap();
    }
  }
  bool prepare() {
    if (idle_.empty() || !transfers_.take(pieces_[idle_.back()], false)) return false;
    transfers_.begin(pieces_[idle_.back()]);
    prepared_.push_back(idle_.back());
    idle_.pop_back();
    return true;
  }
  void reap() {
    unsigned head = 0, n = 0;
    bool pushed = false;
    io_uring_cqe* cqe = nullptr;
    io_uring_for_each_cqe(&ring_, head, cqe) {
      ++n;
      const uint64_t i = io_uring_cqe_get_data64(cqe);
      if (i == kPushEvent) {
        pushed = true;
        continue;
      }
      results_[i] = cqe->res;
      returned_.push_back(static_cast<uint32_t>(i));
      --in_flight_;
    }
    io_uring_cq_advance(&ring_, n);
    if (pushed) listen();
  }
  void listen() {
    eventfd_t count = 0;
    static_cast<void>(::eventfd_read(push_event_, &count));
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    io_uring_prep_poll_add(sqe, push_event_, POLLIN);
    io_uring_sqe_set_data64(sqe, kPushEvent);
  }
  void issue(uint32_t i) {
    Piece& piece = pieces_[i];
    int error = 0;
    const uint64_t bytes = transfers_.next_bytes(piece, error);
    if (error) {
      results_[i] = -error;
      returned_.push_back(i);
      return;
    }
    char* memory = piece.memory + piece.done;
    const int entry = entry_of(memory, bytes);
    const int fd = fixed_files_ ? static_cast<int>(piece.file) : files_[piece.file]->fd();
    const uint64_t at = piece.at + piece.done;
    const auto n = static_cast<unsigned>(bytes);
    io_uring_sqe* sqe = ::io_uring_get_sqe(&ring_);
    if (entry >= 0 && piece.request->writes) {
      io_uring_prep_write_fixed(sqe, fd, memory, n, at, entry);
    } else if (entry >= 0) {
      io_uring_prep_read_fixed(sqe, fd, memory, n, at, entry);
    } else if (piece.request->writes) {
      io_uring_prep_write(sqe, fd, memory, n, at);
    } else {
      io_uring_prep_read(sqe, fd, memory, n, at);
    }
    if (fixed_files_) io_uring_sqe_set_flags(sqe, IOSQE_FIXED_FILE);
    io_uring_sqe_set_data64(sqe, i);
    ++in_flight_;
    // Entries that the kernel does not accept now are submitted with the next call.
    static_cast<void>(::io_uring_submit(&ring_));
  }

  Transfers& transfers_;
  const std::vector<std::unique_ptr<File>>& files_;
  io_uring ring_{};
  bool ready_ = false, fixed_files_ = false, can_register_ = false;
  int push_event_ = -1;
  const uint32_t depth_;
  uint32_t in_flight_ = 0;                    // in the kernel
  std::vector<Piece> pieces_;                 // by user_data
  std::vector<int> results_;                  // by user_data: result of the last I/O call
  std::vector<uint32_t> idle_;                // unused indices of pieces_
  std::deque<uint32_t> prepared_, returned_;  // to be issued next; returned by the kernel and not checked yet
  zr::Mutex mutex_;
  std::map<char*, Registered> registered_ ZR_GUARDED_BY(mutex_);
  std::vector<uint32_t> entries_ ZR_GUARDED_BY(mutex_);  // free entries of the kernel's table
  std::thread thread_;
};

}  // namespace

std::unique_ptr<IoEngine> make_uring(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files,
                                     uint32_t depth, Faults& faults) {
  return std::make_unique<Uring>(transfers, files, depth, faults);
}

}  // namespace nvme
