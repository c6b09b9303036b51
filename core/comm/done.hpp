// A completion: reference-counted, resolved exactly once.
#pragma once

#include <atomic>
#include <string>

#include "zr/abi/host.h"

struct zr_done_s {
  std::atomic<int> references{1};
  std::atomic<zr_code> code{ZR_AGAIN};  // written last: the rest may be read once it is not ZR_AGAIN
  int64_t native = 0;
  std::string message;
  const zr_host* host = nullptr;
};

namespace zr::host {

zr_done* done_new(const zr_host* host);
void done_release(zr_done* done);  // accepts null
void done_resolve(zr_done* done, zr_code code, int64_t native, const char* message);
/// ZR_AGAIN, or what it was resolved with, in `error` too.
zr_code done_poll(zr_done* done, zr_error* error);

}  // namespace zr::host
