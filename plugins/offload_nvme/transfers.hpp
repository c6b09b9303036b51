// The queue of requests that have not ended: in order, cut into pieces that an I/O engine takes, issues and reports.
#pragma once

#include <sys/types.h>

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "allocation.hpp"
#include "file.hpp"
#include "zr/abi/offload.h"
#include "zr/mutex.hpp"

namespace nvme {

struct Request {
  bool writes = false;
  std::vector<zr_transfer> transfers;
  std::vector<Allocation*> allocations;  // by transfer
  zr::Done done;                         // empty: the caller of push() waits
  // Transfers::mutex_ guards the members below.
  uint32_t next = 0;         // the transfer that is cut next
  uint64_t next_offset = 0;  // bytes of it that are already cut
  uint32_t in_flight = 0;    // pieces
  bool issued = false;       // all pieces have been taken
  bool ended = false;
  zr_code code = ZR_OK;  // the first failure
  int64_t native = 0;
  std::string text;
};

/// A contiguous part of one request in one file, transferred by one or more I/O calls.
struct Piece {
  std::shared_ptr<Request> request;
  uint32_t index = 0;  // index of the transfer
  Allocation* allocation = nullptr;
  uint64_t offset = 0;  // in the allocation
  uint32_t file = 0;
  uint64_t at = 0;  // in the file
  char* memory = nullptr;
  uint64_t bytes = 0, done = 0;
  int stalls = 0;  // consecutive calls that transferred no full block
};

class Transfers {
 public:
  /// files and faults must outlive it.
  Transfers(const std::vector<std::unique_ptr<File>>& files, Stripes stripes, bool checksums, Faults& faults);
  /// Queues a request. If it has no completion, waits until it has ended, and throws if it failed. [any]
  void push(const std::shared_ptr<Request>& request) ZR_EXCLUDES(mutex_);
  /// Sets a function that is called after each push(). Call it before the first push().
  void on_push(std::function<void()> wake) { wake_ = std::move(wake); }
  /// Takes the next piece. False: the queue is empty; with `wait`: it is empty and stopped. [any]
  bool take(Piece& piece, bool wait) ZR_EXCLUDES(mutex_);
  /// Lets take() return false once the queue is empty.
  void stop();
  bool stopped() const;

  /// Call before the first I/O call for a piece: records the checksums of a write.
  void begin(const Piece& piece) const;
  /// Most bytes that the next I/O call for the piece may transfer; 0: the call must fail with `error` (for tests).
  uint64_t next_bytes(const Piece& piece, int& error) const;
  /// Call after an I/O call, with its result or -errno. True: call again; false: the piece has ended and is reported.
  bool advance(Piece& piece, ssize_t result);

 private:
  void fail(Piece& piece, int error);
  void finish(Piece& piece, zr_code code, const std::string& text);
  void verify(Piece& piece);
  void flip(const Piece& piece) const;
  void end_request(Request& request);
  const std::vector<std::unique_ptr<File>>& files_;
  const Stripes stripes_;
  const bool checksums_;
  Faults& faults_;
  std::function<void()> wake_;
  mutable zr::Mutex mutex_;
  zr::ConditionVariable work_available_, request_ended_;
  std::deque<std::shared_ptr<Request>> queue_ ZR_GUARDED_BY(mutex_);
  bool stopped_ ZR_GUARDED_BY(mutex_) = false;
};

}  // namespace nvme
