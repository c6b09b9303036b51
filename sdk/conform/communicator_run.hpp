// One rank of a job that checks a communicator, and the collectives of the checks.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "conform/library.hpp"
#include "conform/reference_collective.hpp"
#include "zr/abi/communicator.h"

namespace zr::conform {

/// An open communicator of one instance.
class OpenComm {
 public:
  /// Opens it; all ranks open their communicators in the same order.
  OpenComm(Instance& instance, const Mode& mode = {});
  ~OpenComm();
  OpenComm(const OpenComm&) = delete;
  int rank() const { return instance_.host().options().rank; }
  int world() const { return instance_.host().options().world; }
  const std::string& prefix() const { return prefix_; }  // of keys in the store
  void* comm() const { return comm_; }
  const zr_communicator_api& api() const { return api_; }
  TestHost& host() const { return instance_.host(); }
  /// Submits an operation, with a copy of its arguments that is valid during the call only.
  Answer submit(const zr_coll& coll, Completion* done = nullptr) const;
  /// Submits without a completion; fails if the call fails.
  void run(const zr_coll& coll) const;
  /// Calls progress() once, if the communicator has it.
  void progress() const;
  /// Calls progress() until the completion is resolved; fails after some seconds, or if it is resolved with an error.
  void finish(Completion& done) const;
  void close();
  /// An operation that all ranks must take part in: a barrier, or an all-gather of one byte if there is no barrier. Its
  /// memory belongs to this object.
  zr_coll barrier(uint64_t fingerprint = 7);

 private:
  Instance& instance_;
  Mode mode_;
  const zr_communicator_api& api_;
  std::string prefix_;
  bool has_barrier_;
  std::vector<char> gathered_;  // by barrier(): a byte per rank
  void* comm_ = nullptr;
};

/// The capabilities; fails if the call fails.
zr_comm_caps caps_of(Instance& instance, const Mode& mode = {});
inline bool has(uint64_t set, uint64_t value) { return set >> value & 1; }

/// A collective, described for all ranks.
struct CollectiveCase {
  uint32_t op = ZR_ALL_REDUCE, reduce = ZR_SUM, flags = 0;
  zr_dtype src = ZR_F32, dst = ZR_F32;
  int world = 1, root = 0;
  std::vector<int64_t> parts{};  // elements by rank; for operations that are not cut, their sum is what counts
  bool passes_counts = false, in_place = false;
  /// Elements of all parts.
  int64_t total() const;
  /// The first element of a rank's part.
  int64_t start(int rank) const;
  /// Elements of a rank's src.
  int64_t src_count(int rank) const;
  /// Elements of a rank's dst.
  int64_t dst_count(int rank) const;
  std::string text() const;
};

/// Every operation and dtype that the capabilities have, with no, one, an odd number of and many elements.
std::vector<CollectiveCase> all_cases(const zr_comm_caps& caps, int world);

struct CaseOptions {
  uint64_t seed = 1;
  bool exact = true;                               // numbers whose sum does not depend on the order
  bool completion = false;                         // submits with a completion
  bool checks_source = false;                      // also that src and the memory around dst stay
  std::function<char*(int64_t bytes)> allocate{};  // memory for src and dst; not set: memory with guard pages
};
/// Runs a case on this rank and compares the result with the reference. Throws Failure.
void check_case(const OpenComm& comm, const CollectiveCase& one, const CaseOptions& options);

/// What an operation did on one rank.
struct CaseRun {
  std::string dst;            // its content
  bool stayed_inside = true;  // no byte outside dst has changed: of src, and of the memory around both
};
/// Runs a case on this rank, whose src has this content. Fails if a call fails. dst begins with zeros.
CaseRun run_case(const OpenComm& comm, const CollectiveCase& one, const std::string& src, bool completion);

/// Random bytes of `count` elements; numbers are small integers if `exact`.
std::string random_elements(zr_dtype dtype, int64_t count, uint64_t seed, bool exact);

/// Gathers `count` elements of every rank.
zr_coll all_gather_of(void* src, int64_t count, void* dst, int world, zr_dtype dtype);

/// Runs `body` on an open communicator of every rank of worlds of `worlds` ranks, in processes. `prepare`, if it is
/// set, is called first in each of them.
void on_comms(Case& test, const std::vector<int>& worlds, const std::function<void(OpenComm&, Instance&)>& body,
              const std::function<void(int rank, int world)>& prepare = {});

}  // namespace zr::conform
