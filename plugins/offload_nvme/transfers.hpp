// What is asked for and not over yet: requests in order, cut into pieces that an engine takes, issues and reports.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "allocation.hpp"
#include "file.hpp"
#include "zr/abi/offload.h"

namespace nvme {

struct Request {
  bool writes = false;
  std::vector<zr_transfer> all;
  std::vector<Allocation*> allocations;  // of each
  zr::Done done;                         // empty: whoever pushed it waits
  // The rest is guarded by Transfers.
  uint32_t next = 0;         // the transfer that is cut next, and where
  uint64_t next_offset = 0;  // within it
  uint32_t in_flight = 0;    // pieces
  bool issued = false;       // no further piece comes
  bool over = false;
  zr_code code = ZR_OK;  // the first failure
  int64_t native = 0;
  std::string text;
};

/// Bytes of one request in one file.
struct Piece {
  std::shared_ptr<Request> request;
  uint32_t index = 0;  // of the transfer
  Allocation* allocation = nullptr;
  uint64_t offset = 0;  // in the slot
  uint32_t file = 0;
  uint64_t at = 0;  // in the file
  char* memory = nullptr;
  uint64_t bytes = 0, done = 0;
  int stalls = 0;  // calls in a row that moved nothing
};

class Transfers {
 public:
  /// All but checksums outlive it.
  Transfers(const std::vector<std::unique_ptr<File>>& files, Stripes stripes, bool checksums, Faults& faults);
  /// Queues a request; returns when it is over if it has no completion. Throws its failure then. [any]
  void push(const std::shared_ptr<Request>& request);
  /// Called after each push; set before the first.
  void on_push(std::function<void()> wake) { wake_ = std::move(wake); }
  /// The next piece; false: there is none, with `wait`: and there will be none. [any]
  bool take(Piece& piece, bool wait);
  /// Lets take() return false once the queue is empty.
  void stop();
  bool stopped() const;

  /// Before the first call for a piece: notes what a write writes.
  void begin(const Piece& piece) const;
  /// What the next call for the piece shall move at most; 0: it shall fail with `error`.
  uint64_t next_bytes(const Piece& piece, int& error) const;
  /// After a call: its result, or -errno. True: call again; false: the piece is over, and told of.
  bool advance(Piece& piece, ssize_t result);

 private:
  void fail(Piece& piece, int error);
  void finish(Piece& piece, zr_code code, const std::string& text);
  void verify(Piece& piece);
  void flip(const Piece& piece) const;
  void settle(Request& request);
  const std::vector<std::unique_ptr<File>>& files_;
  const Stripes stripes_;
  const bool checksums_;
  Faults& faults_;
  std::function<void()> wake_;
  mutable std::mutex mutex_;
  std::condition_variable more_, over_;
  std::deque<std::shared_ptr<Request>> queue_;
  bool stopped_ = false;
};

}  // namespace nvme
