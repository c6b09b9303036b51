// The collectives that a strategy or an optimizer issues, through the host's wrapped communicator.
//
//   comm.run(zr::all_gather(shard, full, "weights"));                            // complete on return
//   zr::Done done = comm.start(zr::reduce_scatter(bucket, shard, "bucket 3"));   // done.wait() later
#pragma once

#include "zr/abi/communicator.h"
#include "zr/base.hpp"

#pragma GCC visibility push(hidden)
namespace zr {
inline namespace sdk {

/// A collective on `src` and `dst`; the host fills in the fingerprint. counts: see zr/abi/communicator.h. counts and
/// label must be valid until run() or start() returns.
inline zr_coll collective(uint32_t op, const zr_view& src, const zr_view& dst, const char* label,
                          const int64_t* counts = nullptr) {
  zr_coll c{};
  c.size = sizeof c;
  c.op = op;
  c.src = src;
  c.dst = dst;
  c.counts = counts;
  c.label = label;
  return c;
}
/// Reduces all ranks' src to every rank's dst. flags: ZR_COLL_ACCUMULATE adds to the content of dst; with
/// ZR_COLL_GRADIENTS the user may choose that the sum is not exact.
inline zr_coll all_reduce(const zr_view& src, const zr_view& dst, const char* label, uint32_t flags = 0,
                          uint32_t reduce = ZR_SUM) {
  zr_coll c = collective(ZR_ALL_REDUCE, src, dst, label);
  c.flags = flags;
  c.reduce = reduce;
  return c;
}
/// Sums src over ranks and cuts it by counts (equal parts if counts is null); this rank's part goes to dst.
inline zr_coll reduce_scatter(const zr_view& src, const zr_view& dst, const char* label, uint32_t flags = 0,
                              const int64_t* counts = nullptr) {
  zr_coll c = collective(ZR_REDUCE_SCATTER, src, dst, label, counts);
  c.flags = flags;
  c.reduce = ZR_SUM;
  return c;
}
/// Sums src over ranks to root's dst.
inline zr_coll reduce(const zr_view& src, const zr_view& dst, int32_t root, const char* label, uint32_t flags = 0) {
  zr_coll c = collective(ZR_REDUCE, src, dst, label);
  c.flags = flags;
  c.reduce = ZR_SUM;
  c.root = root;
  return c;
}
/// Gathers every rank's src, in rank order, to every rank's dst. flags: ZR_COLL_GRADIENTS or ZR_COLL_WEIGHTS: with
/// these the user may choose that values are rounded, also those of this rank's own part of dst.
inline zr_coll all_gather(const zr_view& src, const zr_view& dst, const char* label, const int64_t* counts = nullptr,
                          uint32_t flags = 0) {
  zr_coll c = collective(ZR_ALL_GATHER, src, dst, label, counts);
  c.flags = flags;
  return c;
}
/// Gathers every rank's src, in rank order, to root's dst.
inline zr_coll gather(const zr_view& src, const zr_view& dst, int32_t root, const char* label,
                      const int64_t* counts = nullptr) {
  zr_coll c = collective(ZR_GATHER, src, dst, label, counts);
  c.root = root;
  return c;
}
/// Cuts root's src by counts (equal parts if counts is null); the part of each rank goes to its dst.
inline zr_coll scatter(const zr_view& src, const zr_view& dst, int32_t root, const char* label,
                       const int64_t* counts = nullptr) {
  zr_coll c = collective(ZR_SCATTER, src, dst, label, counts);
  c.root = root;
  return c;
}
/// Sends src to a peer, which receives it with an equal tag. The host does not compose messages: the communicator must
/// support them.
inline zr_coll send(const zr_view& src, int32_t peer, int32_t tag, const char* label) {
  zr_coll c = collective(ZR_SEND, src, zr_view{}, label);
  c.peer = peer;
  c.tag = tag;
  return c;
}
/// Receives dst from a peer; see send().
inline zr_coll recv(const zr_view& dst, int32_t peer, int32_t tag, const char* label) {
  zr_coll c = collective(ZR_RECV, zr_view{}, dst, label);
  c.peer = peer;
  c.tag = tag;
  return c;
}
/// Copies root's `view` to every rank's `view`, in place.
inline zr_coll broadcast(const zr_view& view, int32_t root, const char* label) {
  zr_coll c = collective(ZR_BROADCAST, view, view, label);
  c.root = root;
  return c;
}
/// Sends one part of src to each rank and receives one part of dst from each rank. src is cut by counts, dst by
/// recv_counts (if null: by counts).
inline zr_coll all_to_all(const zr_view& src, const zr_view& dst, const char* label, const int64_t* counts = nullptr,
                          const int64_t* recv_counts = nullptr) {
  zr_coll c = collective(ZR_ALL_TO_ALL, src, dst, label, counts);
  c.recv_counts = recv_counts;
  return c;
}
/// Blocks until every rank has entered.
inline zr_coll barrier(const char* label) { return collective(ZR_BARRIER, zr_view{}, zr_view{}, label); }

/// The host's communicator, lent to an instance. Copyable; valid as long as the instance it was bound to. [use]:
/// every rank must issue its collectives in the same order, so the order must not depend on timing.
class Comm {
 public:
  /// `ref`: as bind() received it. stream: where the stream of the current call of the plug-in is stored, as long as
  /// the instance lives; null: there are no streams.
  Comm(const Host& host, const zr_comm_ref& ref, zr_stream* const* stream = nullptr)
      : host_(host), ref_(ref), stream_(stream) {}
  int32_t rank() const { return ref_.rank; }    // 0 to world() - 1
  int32_t world() const { return ref_.world; }  // number of ranks
  /// Runs a collective. Complete on return: dst is written, src may be overwritten. In a call with a stream: complete
  /// in the order of the stream.
  void run(const zr_coll& coll) const { submit(coll, nullptr); }
  /// Starts a collective. The memory of both views must stay valid until the Done is ready. Collectives complete in the
  /// order they were started. In a call with a stream, the Done is empty: the collective is complete in the order of
  /// the stream.
  Done start(const zr_coll& coll) const {
    Done done = stream() ? Done() : Done(host_);
    submit(coll, done.abi());
    return done;
  }
  /// Advances started collectives without waiting.
  void progress() const {
    if (!ref_.api->progress) return;
    zr_error error = no_error();
    check(ref_.api->progress(ref_.comm, &error), error);
  }

 private:
  zr_stream* stream() const { return stream_ ? *stream_ : nullptr; }
  void submit(const zr_coll& coll, zr_done* done) const {
    zr_error error = no_error();
    check(ref_.api->submit(ref_.comm, &coll, stream(), done, &error), error);
  }
  Host host_;
  zr_comm_ref ref_;
  zr_stream* const* stream_;
};

}  // namespace sdk
}  // namespace zr
#pragma GCC visibility pop
