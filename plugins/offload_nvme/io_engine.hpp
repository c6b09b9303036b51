// What moves pieces: io_uring, or threads that read and write.
#pragma once

#include <memory>

#include "transfers.hpp"

namespace nvme {

/// Takes pieces of `transfers` until it is stopped; at most `depth` at a time.
class IoEngine {
 public:
  virtual ~IoEngine() = default;  // stops, waits for what is under way
  /// Memory that many transfers will use. Throws zr::Error: they are slower then.
  virtual void reg(const zr_view&) {}
  virtual void unreg(const zr_view&) {}
};

/// Throws zr::Error(ZR_UNSUPPORTED) where the kernel or a sandbox refuses io_uring. Both refer to all arguments.
std::unique_ptr<IoEngine> make_uring(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files,
                                     uint32_t depth, Faults& faults);
std::unique_ptr<IoEngine> make_threads(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files,
                                       uint32_t depth);

/// Signals are for the program's own threads: none reaches the threads begun while it lives.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;

 private:
  struct State;
  std::unique_ptr<State> before_;
};

}  // namespace nvme
