// Replaces the calls with which comm_mpi sends, in programs that export them: MPI's profiling interface.
#include "multirank/comm/mpi_calls.hpp"

#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>

namespace {
std::array<std::atomic<int64_t>, 64> sent{};  // bytes, by rank
std::atomic<int64_t> longest_buffered{0};

int64_t bytes_of(int count, MPI_Datatype type) {
  int size = 0;
  PMPI_Type_size(type, &size);
  return int64_t{count} * size;
}
}  // namespace

// The communicators of the plug-in have the ranks of the job.
extern "C" __attribute__((visibility("default"))) int MPI_Isend(const void* data, int count, MPI_Datatype type,
                                                                int destination, int tag, MPI_Comm comm,
                                                                MPI_Request* request) {
  sent.at(static_cast<std::size_t>(destination)) += bytes_of(count, type);
  longest_buffered = std::max<int64_t>(longest_buffered, bytes_of(count, type));  // one thread calls MPI
  return PMPI_Isend(data, count, type, destination, tag, comm, request);
}
extern "C" __attribute__((visibility("default"))) int MPI_Issend(const void* data, int count, MPI_Datatype type,
                                                                 int destination, int tag, MPI_Comm comm,
                                                                 MPI_Request* request) {
  sent.at(static_cast<std::size_t>(destination)) += bytes_of(count, type);
  return PMPI_Issend(data, count, type, destination, tag, comm, request);
}

std::vector<int64_t> zr::testing::mpi_bytes_sent(int world) { return {sent.begin(), sent.begin() + world}; }
int64_t zr::testing::longest_buffered_message() { return longest_buffered; }
