#include "requests.hpp"

#include <algorithm>

#include "mpi_thread.hpp"
#include "zr/base.hpp"

namespace mpi {

namespace {
constexpr int64_t kMessageBytes = int64_t{1} << 30;  // of one message; MPI counts in int
constexpr int64_t kBufferedBytes = int64_t{64} << 10;
}  // namespace

MPI_Request& Requests::add_receive(int bytes) {
  expected_.push_back(bytes);
  return requests_.emplace_back(MPI_REQUEST_NULL);
}

bool Requests::complete(const std::string& what) {
  if (requests_.empty()) return true;
  int flag = 0;
  statuses_.assign(requests_.size(), MPI_Status{});
  const int code = MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &flag, statuses_.data());
  int kind = MPI_SUCCESS;
  MPI_Error_class(code, &kind);
  if (kind == MPI_ERR_IN_STATUS)
    for (const MPI_Status& status : statuses_)
      if (status.MPI_ERROR != MPI_ERR_PENDING) check(status.MPI_ERROR, what);
  check(code, what);
  if (!flag) return false;
  for (std::size_t i = 0; i < statuses_.size(); ++i) {
    int bytes = 0;
    if (expected_[i] >= 0) MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes);
    if (expected_[i] >= 0 && bytes != expected_[i])
      throw zr::PluginError(ZR_MISMATCH, what + ": a peer sent " + std::to_string(bytes) +
                                             " bytes, but this rank expects " + std::to_string(expected_[i]) +
                                             "; the ranks disagree about it");
  }
  requests_.clear();
  expected_.clear();
  return true;
}

void Requests::receive(void* data, int64_t bytes, int peer, int tag, MPI_Comm comm, const std::string& what) {
  for (int64_t at = 0; at < bytes; at += kMessageBytes) {
    const int part = static_cast<int>(std::min(kMessageBytes, bytes - at));
    check(MPI_Irecv(static_cast<char*>(data) + at, part, MPI_BYTE, peer, tag, comm, &add_receive(part)), what);
  }
}

void Requests::send(const void* data, int64_t bytes, int peer, int tag, MPI_Comm comm, const std::string& what) {
  for (int64_t at = 0; at < bytes; at += kMessageBytes)
    check(start_send(static_cast<const char*>(data) + at, std::min(kMessageBytes, bytes - at), peer, tag, comm,
                     add_send()),
          what);
}

int start_send(const void* data, int64_t bytes, int peer, int tag, MPI_Comm comm, MPI_Request& request) {
  const auto send = bytes > kBufferedBytes ? MPI_Issend : MPI_Isend;
  return send(data, static_cast<int>(bytes), MPI_BYTE, peer, tag, comm, &request);
}

}  // namespace mpi
