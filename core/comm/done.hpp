// A completion: reference-counted, resolved exactly once.
#pragma once

#include <atomic>
#include <functional>
#include <string>

#include "zr/abi/host.h"

struct zr_done_s {
  std::atomic<int> references{1};
  std::atomic_flag resolved = ATOMIC_FLAG_INIT;
  std::atomic<zr_code> code{ZR_AGAIN};  // written last: the other fields may be read once it is not ZR_AGAIN
  int64_t native = 0;
  std::string message;
  const zr_host* host = nullptr;
  std::function<void(zr_code)> on_resolved;  // called once by the resolver, before `code` changes
  // The collective that was submitted with this completion, for reports; written before submit returns.
  bool of_collective = false;  // false: a completion of a plug-in, which may use it for anything
  uint64_t sequence = 0, fingerprint = 0;
  std::string what;
};

namespace zr::host::comm {

zr_done* done_new(const zr_host* host);  // returns one reference; null: out of memory
void done_release(zr_done* done);        // accepts null
/// A second resolution is a bug in a plug-in: it is logged and has no effect. `caller`: an address in the code that
/// resolves the completion, so that the log can name the plug-in's library; or null.
void done_resolve(zr_done* done, zr_code code, int64_t native, const char* message, const void* caller = nullptr);
/// ZR_AGAIN, or the code with which the completion was resolved; an error is also written to `error`, which may be
/// null.
zr_code done_poll(zr_done* done, zr_error* error);

}  // namespace zr::host::comm
