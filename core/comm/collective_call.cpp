// One collective in progress, and the functions of CommRuntime that submit one.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/device_memory.hpp"
#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/operation.hpp"
#include "base/unknown_bits.hpp"
#include "comm/coll.hpp"
#include "comm/collective_staging.hpp"
#include "comm/comm_runtime.hpp"
#include "comm/compose.hpp"
#include "comm/done.hpp"
#include "comm/open_communicator.hpp"
#include "comm/ordered_reduce.hpp"

namespace zr::host::comm {

namespace {
using Clock = std::chrono::steady_clock;
constexpr int64_t kComposeStagingBytes = int64_t{4} << 20;

// Thrown to leave a composition early; the plug-in has filled the error.
struct Stopped {
  zr_code code;
};
}  // namespace

// One collective in progress. Calls are [use].
class CollectiveCall {
 public:
  // `done` is resolved when the collective has ended, unless the submission fails; null: the submission waits.
  // `control`: it is counted as control traffic. `error` may be null.
  CollectiveCall(CommRuntime& comm, zr_done* done, bool control, zr_error* error)
      : comm_(comm), done_(done), control_(control), error_(error) {}
  // Submits a collective of the engine. A failure is returned as a code and kept for CommRuntime::take_failure(). May
  // throw Error.
  zr_code submit(const zr_coll& coll);
  // The same for a collective of a plug-in, which may be built with newer or older headers.
  zr_code submit_of_plugin(const zr_coll& given, zr_stream* stream);

 private:
  bool may_be_shared() const;
  zr_code start(bool in_stream);
  zr_code issue();
  zr_code issue_async();
  zr_code perform(bool native);
  zr_code run_composed();
  void run_single_rank();
  void run_on_device();
  zr_code enqueue();
  bool is_observed() const { return !control_ && (comm_.trace_ || comm_.on_completed_); }
  std::string name() const;  // "all_reduce 'bucket 3'"

  CommRuntime& comm_;
  zr_done* const done_;
  const bool control_;
  zr_error* const error_;
  zr_coll coll_{};    // as submitted; it is counted and observed
  zr_coll staged_{};  // with memory in place of disk-backed addresses; it is performed
  uint64_t staging_number_ = CollectiveStaging::kNotStaged;
  bool on_device_ = false;
};

std::string CollectiveCall::name() const {
  return fmt::format("{} '{}'", name_of_op(coll_.op), coll_.label ? coll_.label : "");
}

zr_code CollectiveCall::submit(const zr_coll& coll) {
  coll_ = coll;
  return start(false);
}

zr_code CollectiveCall::submit_of_plugin(const zr_coll& given, zr_stream* stream) {
  constexpr std::string_view kBug = "this is a bug in the plug-in";
  const auto reject_bug = [&](zr_code code, const std::string& problem, std::string_view remedy = "") {
    return comm_.reject(code, exit_code::internal, fmt::format("{}: {}{}", problem, kBug, remedy), error_);
  };
  DeviceMemory* const device = comm_.device_;
  if (given.size < ZR_SIZE_0_9(zr_coll))
    return reject_bug(ZR_INVALID, fmt::format("a zr_coll has {} bytes, fewer than in ABI 0.9", given.size));
  if (stream && (!device || stream != device->abi()))
    return reject_bug(ZR_UNSUPPORTED,
                      fmt::format("a collective was submitted with a stream{}",
                                  device ? " that the engine does not know" : ", but the engine has none"));
  if (stream && done_)
    return reject_bug(ZR_UNSUPPORTED,
                      "a collective was submitted with a stream and a completion, which the engine does not offer");
  ZR_TAKE(&coll_, &given);
  if (!stream && device && is_on_device(coll_, comm_.rank_))
    return reject_bug(ZR_INVALID, "a collective on memory of a device was submitted without the stream of the call",
                      "; compile the plug-in again, with the headers of this version");
  if (const std::string problem = unknown_bits_problem(
          "flags", coll_.flags, uint32_t{ZR_COLL_ACCUMULATE} | ZR_COLL_GRADIENTS | ZR_COLL_WEIGHTS | ZR_COLL_SHARED);
      !problem.empty())
    return comm_.reject(ZR_INVALID, exit_code::user, fmt::format("{}: {}", name(), problem), error_);
  const uint32_t content = coll_.flags & (uint32_t{ZR_COLL_GRADIENTS} | ZR_COLL_WEIGHTS);
  if (content == (uint32_t{ZR_COLL_GRADIENTS} | ZR_COLL_WEIGHTS))
    return reject_bug(ZR_INVALID, name() + ": its flags say that it has gradients and that it has weights");
  if ((coll_.flags & ZR_COLL_SHARED) && !may_be_shared())
    return reject_bug(ZR_INVALID, name() +
                                      " has ZR_COLL_SHARED, which is for all_gathers in place in a buffer with "
                                      "ZR_BUFFER_SHARED of a job with ZR_PLAN_SHARE_ON_HOSTS");
  coll_.flags = flags_of_job(coll_.flags, comm_.options_.gradients, comm_.options_.weights);
  return start(stream != nullptr);
}

bool CollectiveCall::may_be_shared() const {
  if (coll_.op != ZR_ALL_GATHER || std::ranges::max(comm_.control_->hosts()) == 0) return false;
  if (coll_.dst.count == 0) return true;
  const char* const dst = bytes_of(coll_.dst);
  const int64_t width = size_of(coll_.dst.dtype);
  const int64_t first = part_of_rank(coll_.counts, coll_.dst.count, comm_.rank_, comm_.world_).first;
  if (coll_.src.count > 0 && bytes_of(coll_.src) != dst + first * width) return false;
  return std::ranges::any_of(comm_.shared_, [&](const auto& range) {
    return dst >= range.first && dst + coll_.dst.count * width <= range.second;
  });
}

// Validates, stages, numbers and describes coll_, and performs it or begins it.
zr_code CollectiveCall::start(bool in_stream) {
  if (comm_.job_failure_) return comm_.fail_job("the job has failed", error_);
  comm_.failure_ = nullptr;  // set by an earlier call whose caller continued
  coll_.size = sizeof coll_;
  const zr_device device = comm_.device_ ? comm_.device_->device() : kHostMemory;
  if (const std::string why = problem_of(coll_, comm_.rank_, comm_.world_, device); !why.empty())
    return comm_.reject(ZR_INVALID, exit_code::user, fmt::format("{}: {}", name(), why), error_);
  coll_.fingerprint = fingerprint_of(coll_, comm_.world_);
  on_device_ = comm_.device_ && (is_on_device(coll_, comm_.rank_) || (in_stream && coll_.op == ZR_BARRIER));
  staged_ = coll_;
  const auto wait = [&](zr_done* done) { return comm_.wait(done, -1, error_); };
  if (const zr_code code = comm_.staging_.stage(staged_, staging_number_, wait); code != ZR_OK) return code;
  control::Activity& activity = comm_.activity_;
  if (!is_message(coll_)) activity.sequence = comm_.control_->next_sequence();
  activity.fingerprint = coll_.fingerprint;
  if (comm_.world_ > 1) {
    describe(coll_, comm_.world_, activity.what, comm_.call_);
    if (comm_.control_->broken()) {
      comm_.staging_.unstage(staging_number_, false);
      return comm_.fail_job("about to issue " + activity.what, error_);
    }
  }
  ++comm_.issued_;
  if (done_) {
    ++comm_.submitted_;
    done_->of_collective = true;
    done_->sequence = activity.sequence;
    done_->fingerprint = activity.fingerprint;
    done_->what = activity.what;
  }
  try {
    const zr_code code = issue();
    if (code != ZR_OK) comm_.staging_.unstage(staging_number_, false);
    return code;
  } catch (...) {
    comm_.staging_.unstage(staging_number_, false);
    throw;
  }
}

// If it fails, done_ is not resolved.
zr_code CollectiveCall::issue() {
  const bool native = comm_.world_ > 1 && is_native(comm_.caps_, coll_);
  if (native && done_ && (comm_.caps_.flags & ZR_COMM_ASYNC)) return issue_async();
  const auto begin = Clock::now();
  if (const zr_code code = perform(native); code != ZR_OK) return code;
  if (native || comm_.world_ == 1) comm_.counter_.add(coll_.op, comm_.counter_.received_bytes(coll_), control_);
  if (is_observed()) comm_.notify_completed(coll_, staged_.dst.data, comm_.issued_, begin);
  comm_.staging_.unstage(staging_number_, true);
  if (done_) done_resolve(done_, ZR_OK, 0, nullptr);
  return ZR_OK;
}

// Submits the collective to the plug-in, which resolves done_, perhaps after the end of this object: then the
// collective is reported if it is observed, and unstaged.
zr_code CollectiveCall::issue_async() {
  if (const bool observed = is_observed(); observed || staging_number_)
    done_->on_resolved = [&comm = comm_, coll = coll_, begin = Clock::now(), observed, number = staging_number_,
                          dst = staged_.dst.data, issued = comm_.issued_,
                          label = std::string(coll_.label ? coll_.label : "")](zr_code code) {
      zr_coll completed = coll;
      completed.label = label.c_str();
      completed.counts = completed.recv_counts = nullptr;
      if (code == ZR_OK && observed) comm.notify_completed(completed, dst, issued, begin);
      comm.staging_.unstage(number, code == ZR_OK);
    };
  comm_.control_->set_activity(comm_.activity_);
  const zr_code code = comm_.finish(comm_.on_host_->submit(staged_, nullptr, done_, error_), error_);
  if (code == ZR_OK && staging_number_) comm_.staging_.add(done_);
  comm_.activity_.what.clear();
  comm_.control_->set_activity(comm_.activity_);
  if (code == ZR_OK)
    comm_.counter_.add(coll_.op, comm_.counter_.received_bytes(coll_), control_);
  else
    done_->on_resolved = nullptr;
  return code;
}

// Performs the collective before it returns. `native`: see is_native().
zr_code CollectiveCall::perform(bool native) {
  if (comm_.world_ == 1) {
    on_device_ ? run_on_device() : run_single_rank();
    return ZR_OK;
  }
  const CommRuntime::Waiting waiting(comm_);
  if (on_device_) return comm_.finish(enqueue(), error_);
  return comm_.finish(native ? comm_.on_host_->submit(staged_, nullptr, nullptr, error_) : run_composed(), error_);
}

zr_code CollectiveCall::run_composed() {
  if (!comm_.compose_staging_) {
    comm_.host_.ledger().plan(Tier::host, MemoryKind::communicator, kComposeStagingBytes);
    comm_.compose_staging_ = static_cast<char*>(
        comm_.allocate(kComposeStagingBytes, 64, Tier::host, MemoryKind::communicator, "composed collectives"));
  }
  const zr_comm_caps& caps = comm_.caps_;
  const auto transfers = [&](zr_dtype dtype) { return (caps.dtypes & bit(static_cast<uint64_t>(dtype))) != 0; };
  int64_t received = 0;
  std::vector<int64_t> bytes;
  const auto run = [&](zr_coll part) {
    part.size = sizeof part;
    part.flags = 0;
    part.fingerprint = staged_.fingerprint;
    part.label = staged_.label;
    received += comm_.counter_.received_bytes(part);
    if (!transfers(part.src.dtype)) {  // transferred as bytes
      const int64_t size = size_of(part.src.dtype);
      for (zr_view* view : {&part.src, &part.dst}) *view = {view->data, view->count * size, ZR_U8, 0, view->device};
      if (part.counts) {
        bytes.assign(part.counts, part.counts + comm_.world_);
        for (int64_t& n : bytes) n *= size;
        part.counts = bytes.data();
      }
    }
    if (const zr_code code = comm_.on_host_->submit(part, nullptr, nullptr, error_)) throw Stopped{code};
  };
  const bool exchanges = (caps.ops & bit(ZR_ALL_TO_ALL)) && transfers(staged_.src.dtype);
  try {
    const std::string why = compose(staged_, {comm_.rank_, comm_.world_, exchanges, comm_.compose_staging_,
                                              kComposeStagingBytes, comm_.host_.pool(), run});
    if (!why.empty()) return fill_error(error_, ZR_UNSUPPORTED, why);
  } catch (const Stopped& stopped) {
    return stopped.code;
  }
  comm_.counter_.add(staged_.op, received, control_);
  return ZR_OK;
}

// In a world of one, the only source is that of this rank.
void CollectiveCall::run_single_rank() {
  const zr_view &src = staged_.src, &dst = staged_.dst;
  if (is_reduction(staged_)) return ordered_reduce(comm_.host_.pool(), staged_, dst, {src.data});
  if (staged_.op != ZR_BARRIER && src.count > 0 && src.data != dst.data)
    std::memmove(dst.data, src.data, static_cast<std::size_t>(src.count * size_of(src.dtype)));
}

// The same in memory of a device.
void CollectiveCall::run_on_device() {
  const zr_view &src = staged_.src, &dst = staged_.dst;
  if (src.count == 0) return;
  const bool accumulates = staged_.flags & ZR_COLL_ACCUMULATE;
  if (is_reduction(staged_) && (staged_.reduce == ZR_SUM || accumulates)) {
    if (staged_.reduce != ZR_SUM)
      fail_internal(name() + " accumulates a minimum or maximum, which the engine does not offer on a device");
    return comm_.device_->add(src, dst, !accumulates);
  }
  if (src.data != dst.data) comm_.device_->copy(src, dst);
}

// In memory of a device with several ranks: the peers' calls are waited for, but not the device.
zr_code CollectiveCall::enqueue() {
  if (!is_native(comm_.caps_, staged_))
    return fill_error(error_, ZR_UNSUPPORTED,
                      fmt::format("it does not offer this {} in memory of a device; choose another strategy, or set "
                                  "offload.gradients = \"cpu\"",
                                  name_of_op(staged_.op)));
  zr_code code = ZR_OK;
  comm_.device_->run([&](zr_stream* stream) { code = comm_.on_device_->submit(staged_, stream, nullptr, error_); });
  if (code == ZR_OK) comm_.enqueued_.add(*comm_.device_);
  return code;
}

zr_comm_ref CommRuntime::ref() const {
  static const zr_collectives_api kTable{sizeof(zr_collectives_api), 0, abi_submit, abi_progress};
  return {&kTable, const_cast<CommRuntime*>(this), rank_, world_};
}

zr_code CommRuntime::abi_submit(void* self, const zr_coll* coll, zr_stream* stream, zr_done* done,
                                zr_error* error) noexcept {
  auto& comm = *static_cast<CommRuntime*>(self);
  try {
    return CollectiveCall(comm, done, false, error).submit_of_plugin(*coll, stream);
  } catch (const std::exception& e) {
    comm.failure_ = std::current_exception();
    return fill_error(error, ZR_INTERNAL, e.what());
  }
}

zr_code CommRuntime::abi_progress(void* self, zr_error* error) noexcept {
  auto& comm = *static_cast<CommRuntime*>(self);
  try {
    const zr_code code = comm.progress(error);
    return code == ZR_AGAIN ? zr_code{ZR_OK} : comm.finish(code, error, "progress");
  } catch (const std::exception& e) {
    comm.failure_ = std::current_exception();
    return fill_error(error, ZR_INTERNAL, e.what());
  }
}

void CommRuntime::run(const zr_coll& coll, bool control) {
  CallError error;
  const zr_code code = CollectiveCall(*this, nullptr, control, &error).submit(coll);
  if (code == ZR_OK) return;
  if (const auto failure = take_failure()) std::rethrow_exception(failure);
  check(code, error, "collective");
}

void CommRuntime::notify_completed(const zr_coll& coll, const void* dst, int64_t number, Trace::Time begin) {
  if (trace_)
    trace_->span("collectives", fmt::format("{} {}", name_of_op(coll.op), coll.label ? coll.label : ""), begin,
                 Clock::now());
  if (on_completed_) on_completed_(coll, dst, number);
}

}  // namespace zr::host::comm
