// Replaces MPI_Isend, the only call with which comm_mpi sends, in programs that export it: MPI's profiling interface.
#include "multirank/comm/mpi_calls.hpp"

#include <mpi.h>

#include <array>
#include <atomic>

namespace {
std::array<std::atomic<int64_t>, 64> sent{};  // bytes, by rank
}

// The communicators of the plug-in have the ranks of the job.
extern "C" __attribute__((visibility("default"))) int MPI_Isend(const void* data, int count, MPI_Datatype type,
                                                                int destination, int tag, MPI_Comm comm,
                                                                MPI_Request* request) {
  int size = 0;
  PMPI_Type_size(type, &size);
  sent.at(static_cast<std::size_t>(destination)) += int64_t{count} * size;
  return PMPI_Isend(data, count, type, destination, tag, comm, request);
}

std::vector<int64_t> zr::testing::mpi_bytes_sent(int world) { return {sent.begin(), sent.begin() + world}; }
