#include "transfers.hpp"

#include <unistd.h>
#include <xxhash.h>
#if defined(__x86_64__) && !defined(XXH_INLINE_ALL)
#include <xxh_x86dispatch.h>  // the instructions of this processor; only the shared library has them
#endif

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace nvme {

namespace {
constexpr int kMaxStalls = 1000;

// The checksum of a block; never 0, which means that the block was not written.
uint32_t checksum_of(const char* block) {
  const auto sum = static_cast<uint32_t>(XXH3_64bits(block, kAlign));
  return sum ? sum : 1;
}

const char* remedy(int error) {
  if (error == ENOSPC || error == EDQUOT) return "free disk space there, or set offload.nvme.path to a larger disk";
  if (error == EFBIG) return "raise the limit of file sizes (ulimit -f)";
  return "the disk may be failing; set offload.nvme.path to a folder on another disk";
}
}  // namespace

Transfers::Transfers(const std::vector<std::unique_ptr<File>>& files, Stripes stripes, bool checksums, Faults& faults)
    : files_(files), stripes_(stripes), checksums_(checksums), faults_(faults) {}

void Transfers::push(const std::shared_ptr<Request>& request) {
  {
    const zr::MutexLock lock(mutex_);
    queue_.push_back(request);
  }
  work_available_.notify_all();
  if (wake_) wake_();
  if (request->done) return;
  zr::MutexLock lock(mutex_);
  request_ended_.wait(lock, [&] { return request->ended; });
  if (request->code != ZR_OK) throw zr::PluginError(request->code, request->text, request->native);
}

bool Transfers::take(Piece& piece, bool wait) {
  zr::MutexLock lock(mutex_);
  for (;;) {
    while (!queue_.empty()) {
      const std::shared_ptr<Request> request = queue_.front();
      while (request->next < request->transfers.size() &&
             static_cast<uint64_t>(request->transfers[request->next].memory.count) == request->next_offset) {
        ++request->next;
        request->next_offset = 0;
      }
      if (request->next < request->transfers.size() && request->code == ZR_OK) {
        const zr_transfer& transfer = request->transfers[request->next];
        piece = Piece{};
        piece.request = request;
        piece.index = request->next;
        piece.allocation = request->allocations[request->next];
        piece.offset = transfer.offset + request->next_offset;
        const uint64_t block = piece.offset / stripes_.block_bytes, within = piece.offset % stripes_.block_bytes;
        piece.file = static_cast<uint32_t>(block % stripes_.files);
        piece.at = piece.allocation->at[piece.file] + block / stripes_.files * stripes_.block_bytes + within;
        piece.memory = static_cast<char*>(transfer.memory.data) + request->next_offset;
        piece.bytes = std::min(stripes_.block_bytes - within,
                               static_cast<uint64_t>(transfer.memory.count) - request->next_offset);
        request->next_offset += piece.bytes;
        ++request->in_flight;
        return true;
      }
      queue_.pop_front();
      request->issued = true;
      if (request->in_flight > 0) continue;
      lock.unlock();
      end_request(*request);
      lock.lock();
    }
    if (!wait || stopped_) return false;
    work_available_.wait(lock);
  }
}

void Transfers::stop() {
  {
    const zr::MutexLock lock(mutex_);
    stopped_ = true;
  }
  work_available_.notify_all();
  if (wake_) wake_();
}

bool Transfers::stopped() const {
  const zr::MutexLock lock(mutex_);
  return stopped_;
}

void Transfers::begin(const Piece& piece) const {
  if (!checksums_ || !piece.request->writes) return;
  for (uint64_t i = 0; i < piece.bytes; i += kAlign)
    piece.allocation->checksums[(piece.offset + i) / kAlign].store(checksum_of(piece.memory + i),
                                                                   std::memory_order_relaxed);
}

uint64_t Transfers::next_bytes(const Piece& piece, int& error) const {
  const Fault fault = faults_.at(piece.request->writes ? "write" : "read");
  const uint64_t remaining = piece.bytes - piece.done;
  error = fault.error;
  if (error) return 0;
  if (!fault.cut || remaining <= kAlign) return remaining;
  return remaining / 2 / 512 * 512 + 512;  // more than half, and not a multiple of kAlign
}

bool Transfers::advance(Piece& piece, ssize_t result) {
  faults_.slow();
  const bool writes = piece.request->writes;
  if (result < 0 && result != -EINTR && result != -EAGAIN) {
    fail(piece, static_cast<int>(-result));
    return false;
  }
  // With O_DIRECT the next call must begin at a block boundary.
  const uint64_t moved = result < 0 ? 0 : static_cast<uint64_t>(result) / kAlign * kAlign;
  piece.done += moved;
  piece.stalls = moved ? 0 : piece.stalls + 1;
  if (result == 0 || piece.stalls > kMaxStalls) {
    fail(piece, writes && result == 0 ? ENOSPC : EIO);
    return false;
  }
  if (piece.done < piece.bytes) return true;
  if (writes && faults_.flips()) flip(piece);
  if (!writes && checksums_) {
    verify(piece);
  } else {
    finish(piece, ZR_OK, "");
  }
  return false;
}

void Transfers::fail(Piece& piece, int error) {
  finish(piece, ZR_IO,
         "tier nvme: " + files_[piece.file]->name() + ": " + (piece.request->writes ? "writing " : "reading ") +
             std::to_string(piece.bytes - piece.done) + " bytes at byte " + std::to_string(piece.at + piece.done) +
             " failed: " + std::strerror(error) + "; " + remedy(error));
}

void Transfers::verify(Piece& piece) {
  for (uint64_t i = 0; i < piece.bytes; i += kAlign) {
    const uint32_t sum = piece.allocation->checksums[(piece.offset + i) / kAlign].load(std::memory_order_relaxed);
    if (sum == 0 || sum == checksum_of(piece.memory + i)) continue;
    return finish(piece, ZR_IO,
                  "tier nvme: " + files_[piece.file]->name() + ": reading " + std::to_string(kAlign) +
                      " bytes at byte " + std::to_string(piece.at + i) + " returned other data than was written; " +
                      remedy(EIO));
  }
  finish(piece, ZR_OK, "");
}

// For tests: flips the lowest bit of the piece's first byte on the disk.
void Transfers::flip(const Piece& piece) const {
  void* block = std::aligned_alloc(kAlign, kAlign);
  const auto at = static_cast<off_t>(piece.at);
  const int fd = files_[piece.file]->fd();
  if (block && ::pread(fd, block, kAlign, at) == static_cast<ssize_t>(kAlign)) {
    *static_cast<char*>(block) ^= 1;
    static_cast<void>(::pwrite(fd, block, kAlign, at) == 0);
  }
  std::free(block);
}

void Transfers::finish(Piece& piece, zr_code code, const std::string& text) {
  const std::shared_ptr<Request> request = std::move(piece.request);
  {
    const zr::MutexLock lock(mutex_);
    if (code != ZR_OK && request->code == ZR_OK) {
      request->code = code;
      request->native = piece.index;
      request->text = text;
      if (!request->issued) queue_.erase(std::find(queue_.begin(), queue_.end(), request));
      request->issued = true;
    }
    if (--request->in_flight > 0 || !request->issued) return;
  }
  end_request(*request);
}

// Called when no piece of the request is in flight any more; only the caller still uses the request.
void Transfers::end_request(Request& request) {
  if (request.done) return request.done.resolve(request.code, request.native, request.text.c_str());
  const zr::MutexLock lock(mutex_);
  request.ended = true;
  request_ended_.notify_all();
}

}  // namespace nvme
