// The messages of MPI that this process has sent: mpi_calls.cpp, in the test program, counts the plug-in's calls.
#pragma once

#include <cstdint>
#include <vector>

namespace zr::testing {

/// Bytes to each of the first `world` ranks of the job.
std::vector<int64_t> mpi_bytes_sent(int world);
/// The most bytes of a message that may be complete before the peer has a receive for it.
int64_t longest_buffered_message();

}  // namespace zr::testing
