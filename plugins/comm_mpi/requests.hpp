// Messages of MPI that complete together.
#pragma once

#include <mpi.h>

#include <cstdint>
#include <string>
#include <vector>

namespace mpi {

inline constexpr int64_t kPieceBytes = int64_t{512} << 10;  // of a message of a reduction

/// [MPI thread]
class Requests {
 public:
  MPI_Request& add_send() { return add_receive(-1); }
  /// A message of exactly so many bytes.
  MPI_Request& add_receive(int bytes);
  /// Messages of any size, in parts that MPI can count. Throw PluginError with `what` if they fail.
  void receive(void* data, int64_t bytes, int peer, int tag, MPI_Comm comm, const std::string& what);
  void send(const void* data, int64_t bytes, int peer, int tag, MPI_Comm comm, const std::string& what);
  bool empty() const { return requests_.empty(); }
  /// True once all are complete; they are forgotten then. Throws PluginError with `what` if one failed, or received
  /// fewer bytes.
  bool complete(const std::string& what);

 private:
  std::vector<MPI_Request> requests_;
  std::vector<int> expected_;  // bytes; -1: a send
  std::vector<MPI_Status> statuses_;
};

/// Starts a message of at most 1 GiB. One of more than 64 KiB is complete only when the peer has a receive for it:
/// otherwise MPI could buffer any number of messages, here or on the peer. Returns MPI's code. [MPI thread]
int start_send(const void* data, int64_t bytes, int peer, int tag, MPI_Comm comm, MPI_Request& request);

}  // namespace mpi
