// I/O engines: io_uring, or threads that read and write.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <memory>

#include "transfers.hpp"

namespace nvme {

/// Takes pieces from `transfers` and executes them until it is stopped; at most `depth` at a time.
class IoEngine {
 public:
  virtual ~IoEngine() = default;  // stops, and waits for the pieces in flight
  /// Registers memory that many transfers will use. If it throws zr::PluginError, the transfers still work, but slower.
  virtual void reg(const zr_view&) {}
  virtual void unreg(const zr_view&) {}
};

/// make_uring throws zr::PluginError(ZR_UNSUPPORTED) if the kernel or a sandbox does not permit io_uring. Both engines
/// keep references to all arguments.
std::unique_ptr<IoEngine> make_uring(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files,
                                     uint32_t depth, Faults& faults);
std::unique_ptr<IoEngine> make_threads(Transfers& transfers, const std::vector<std::unique_ptr<File>>& files,
                                       uint32_t depth);

/// Blocks all signals for threads that are started during its lifetime: signals belong to the program's own threads.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace nvme
