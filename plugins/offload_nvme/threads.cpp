// The engine without io_uring: `depth` threads, each with one transfer at a time.
#include <unistd.h>

#include <cerrno>
#include <thread>

#include "io_engine.hpp"

namespace nvme {

namespace {

class Threads final : public IoEngine {
 public:
  Threads(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files, uint32_t depth)
      : transfers_(transfers), files_(files) {
    const BlockedSignals none;
    try {
      for (uint32_t i = 0; i < depth; ++i) threads_.emplace_back([this] { run(); });
    } catch (const std::system_error&) {
      if (threads_.empty()) throw;  // fewer threads also work
    }
  }
  ~Threads() override {
    transfers_.stop();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  void run() {
    for (Piece piece; transfers_.take(piece, true);) {
      transfers_.begin(piece);
      while (transfers_.advance(piece, call(piece))) {
      }
    }
  }
  ssize_t call(const Piece& piece) const {
    int error = 0;
    const uint64_t bytes = transfers_.next_bytes(piece, error);
    if (error) return -error;
    const int fd = files_[piece.file]->fd();
    const auto at = static_cast<off_t>(piece.at + piece.done);
    char* memory = piece.memory + piece.done;
    const ssize_t n = piece.request->writes ? ::pwrite(fd, memory, bytes, at) : ::pread(fd, memory, bytes, at);
    return n < 0 ? -errno : n;
  }
  Transfers& transfers_;
  const std::vector<std::unique_ptr<File>>& files_;
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<IoEngine> make_threads(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files,
                                       uint32_t depth) {
  return std::make_unique<Threads>(transfers, files, depth);
}

}  // namespace nvme
