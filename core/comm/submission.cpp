#include "comm/submission.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <cstring>
#include <tuple>
#include <vector>

#include "base/dtype.hpp"
#include "base/error.hpp"
#include "base/text.hpp"
#include "comm/coll.hpp"
#include "comm/compose.hpp"
#include "comm/done.hpp"
#include "comm/ordered_reduce.hpp"

namespace zr::host::comm {

namespace {
using Clock = std::chrono::steady_clock;

// Thrown to leave a composition early; the plug-in has filled the error.
struct Stopped {
  zr_code code;
};

constexpr std::string_view kNotResolved = "the completion was not resolved within the timeout";

// The error codes after which the job cannot continue.
bool ends_job(zr_code code) {
  return code == ZR_COMM || code == ZR_TIMEOUT || code == ZR_CANCELLED || code == ZR_MISMATCH;
}
}  // namespace

// During its lifetime, the activity shows that this rank waits, in which collective, and since when.
struct Submission::Waiting {
  explicit Waiting(Submission& s) : submission(s) {
    submission.activity_.waiting = true;
    submission.control_->set_activity(submission.activity_);
    submission.waiting_since_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
  }
  ~Waiting() {
    submission.waiting_since_.store(0, std::memory_order_relaxed);
    submission.activity_.waiting = false;
    submission.activity_.what.clear();
    submission.control_->set_activity(submission.activity_);
  }
  Waiting(const Waiting&) = delete;
  Submission& submission;
};

zr_comm_ref Submission::ref() {
  static const zr_collectives_api kTable{sizeof(zr_collectives_api), 0, abi_submit, abi_progress};
  return {&kTable, this, rank_, world_};
}

std::exception_ptr Submission::take_failure() { return std::exchange(failure_, nullptr); }

// The job has failed on this rank. The failure report goes into the Error that every later call throws.
zr_code Submission::fail_job(const std::string& observation, zr_error* error) {
  if (!job_failure_) job_failure_ = std::make_exception_ptr(PeerLostError(control_->report(observation)));
  failure_ = job_failure_;
  return fill_error(error, ZR_COMM, observation);
}

zr_code Submission::reject(zr_code code, int exit_code, const std::string& text, zr_error* error) {
  failure_ = error_with(exit_code, text);
  return fill_error(error, code, text);
}

std::string Submission::timeout_text() const { return duration_text(std::chrono::duration<double>(timeout_).count()); }

// A world of one has no plug-in, but plug-ins may resolve completions with an error.
std::string Submission::call_text(const char* call) const { return instance_ ? instance_->call_text(call) : call; }

// Converts the result of a function of the plug-in to an Error. activity_ still describes the collective.
zr_code Submission::finish(zr_code code, zr_error* error, const char* call) {
  if (code == ZR_OK) return code;
  if (exceeded_timeout_)
    return fail_job(fmt::format("waited longer than communicator.timeout ({}){}", timeout_text(),
                                activity_.what.empty() ? "" : " in " + activity_.what),
                    error);
  std::string text = error ? plugin_text(*error) : "";
  if (text.empty()) text = fmt::format("error code {}", code);
  if (code == ZR_MISMATCH) return fail_job(text, error);
  const std::string what = activity_.what.empty() ? text : fmt::format("{}: {}", activity_.what, text);
  if (ends_job(code)) return fail_job(what, error);
  const int exit = code == ZR_INVALID                                            ? exit_code::user
                   : code == ZR_UNSUPPORTED || code == ZR_NOMEM || code == ZR_IO ? exit_code::environment
                                                                                 : exit_code::internal;
  return reject(code, exit, fmt::format("{}: {}", call_text(call), what), error);
}

// In a world of one, the only source is that of this rank.
void Submission::run_single_rank(const zr_coll& coll, bool on_device) {
  if (on_device) return run_on_device(coll);
  if (is_reduction(coll)) return ordered_reduce(host_.pool(), coll, coll.dst, {coll.src.data});
  if (coll.op != ZR_BARRIER && coll.src.count > 0 && coll.src.data != coll.dst.data)
    std::memmove(coll.dst.data, coll.src.data, static_cast<std::size_t>(coll.src.count * size_of(coll.src.dtype)));
}

// Peers whose part in an earlier collective is missing may keep the device from what is waited for.
void Submission::wait_for_device(const std::function<void()>& wait) {
  if (!on_device_) return wait();
  const std::string outer = activity_.what;
  activity_.what = "a wait for the device";
  {
    const Waiting waiting(*this);
    wait();
  }
  activity_.what = "a wait for the device";
  CallError error;
  zr_code code = on_device_->progress(&error);  // a collective may have failed while the device continues
  if (exceeded_timeout_ || control_->broken()) code = fill_error(&error, ZR_CANCELLED, "the job has failed");
  if (code != ZR_OK) {
    finish(code, &error);
    std::rethrow_exception(take_failure());
  }
  activity_.what = outer;
}

// The plug-in waits for the other ranks of the host.
std::pair<void*, const void*> Submission::shared_alloc(uint64_t bytes) {
  const std::string outer = activity_.what, what = "the allocation of memory that the ranks of a host share";
  const auto alloc = [&] {
    activity_.what = what;
    const Waiting waiting(*this);
    return on_host_->shared_alloc(bytes);
  };
  try {
    const auto memory = alloc();
    activity_.what = outer;
    return memory;
  } catch (const Error& failure) {
    if (exceeded_timeout_ || control_->broken()) {
      activity_.what = what;
      CallError error;
      finish(fill_error(&error, ZR_CANCELLED, failure.what()), &error);
      std::rethrow_exception(take_failure());
    }
    activity_.what = outer;
    throw;
  }
}

zr_code Submission::run_composed(const zr_coll& coll, bool control, zr_error* error) {
  if (!staging_) staging_ = allocate_staging_();
  int64_t received = 0;
  std::vector<int64_t> bytes;
  const auto run = [&](zr_coll part) {
    part.size = sizeof part;
    part.flags = 0;
    part.fingerprint = coll.fingerprint;
    part.label = coll.label;
    received += counter_.received_bytes(part);
    if (!(caps_.dtypes & bit(static_cast<uint64_t>(part.src.dtype)))) {  // transferred as bytes
      const int64_t size = size_of(part.src.dtype);
      for (zr_view* view : {&part.src, &part.dst}) *view = {view->data, view->count * size, ZR_U8, 0, view->device};
      if (part.counts) {
        bytes.assign(part.counts, part.counts + world_);
        for (int64_t& n : bytes) n *= size;
        part.counts = bytes.data();
      }
    }
    if (const zr_code code = on_host_->submit(part, nullptr, nullptr, error)) throw Stopped{code};
  };
  const bool exchanges =
      (caps_.ops & bit(ZR_ALL_TO_ALL)) && (caps_.dtypes & bit(static_cast<uint64_t>(coll.src.dtype)));
  try {
    const std::string why = compose(coll, {rank_, world_, exchanges, staging_, kStagingBytes, host_.pool(), run});
    if (!why.empty()) return fill_error(error, ZR_UNSUPPORTED, why);
  } catch (const Stopped& stopped) {
    return stopped.code;
  }
  counter_.add(coll.op, received, control);
  return ZR_OK;
}

void Submission::notify_completed(const zr_coll& coll, const void* dst, int64_t number, Trace::Time begin) {
  if (trace_)
    trace_->span("collectives", fmt::format("{} {}", name_of_op(coll.op), coll.label ? coll.label : ""), begin,
                 Clock::now());
  if (on_completed_) on_completed_(coll, dst, number);
}

// Staging buffers are released in the order of submission, and all ranks submit in the same order, so waiting for the
// oldest collective cannot deadlock.
zr_code Submission::stage(StagedCollective& staged, zr_error* error) {
  if (!collective_staging_) return ZR_OK;
  while (!staged_completions_.empty() &&
         staged_completions_.front()->code.load(std::memory_order_acquire) != ZR_AGAIN) {
    done_release(staged_completions_.front());
    staged_completions_.pop_front();
  }
  while ((staged.number = collective_staging_->stage(staged.coll)) == CollectiveStaging::kNoCapacity) {
    if (staged_completions_.empty())
      fail_internal("no staging buffer for a collective that reads from a tier, although no other is in flight");
    zr_done* first = staged_completions_.front();
    staged_completions_.pop_front();
    const zr_code code = wait(first, -1, error);
    done_release(first);
    if (code != ZR_OK) return code;
  }
  return ZR_OK;
}

void Submission::unstage(uint64_t number, bool succeeded) noexcept {
  if (number != CollectiveStaging::kNotStaged && collective_staging_) collective_staging_->unstage(number, succeeded);
}

// `coll` is the collective as submitted; it is counted and observed. `staged` is the staged collective; it is
// performed. If this fails, `done` is not resolved.
zr_code Submission::issue(const zr_coll& coll, const StagedCollective& staged, zr_done* done, bool control,
                          zr_error* error) {
  const bool native = world_ > 1 && is_native(caps_, coll);
  if (native && done && (caps_.flags & ZR_COMM_ASYNC)) return issue_async(coll, staged, done, control, error);
  const auto begin = Clock::now();
  if (const zr_code code = perform(staged, native, control, error); code != ZR_OK) {
    unstage(staged.number, false);
    return code;
  }
  if (native || world_ == 1) counter_.add(coll.op, counter_.received_bytes(coll), control);
  if (is_observed(control)) notify_completed(coll, staged.coll.dst.data, issued_, begin);
  unstage(staged.number, true);
  if (done) done_resolve(done, ZR_OK, 0, nullptr);
  return ZR_OK;
}

// Performs the collective before it returns. `native`: see is_native().
zr_code Submission::perform(const StagedCollective& staged, bool native, bool control, zr_error* error) {
  const zr_coll& coll = staged.coll;
  if (world_ == 1) {
    run_single_rank(coll, staged.on_device);
    return ZR_OK;
  }
  const Waiting waiting(*this);
  if (staged.on_device) return finish(enqueue(coll, error), error);
  return finish(native ? on_host_->submit(coll, nullptr, nullptr, error) : run_composed(coll, control, error), error);
}

// Submits the collective to the plug-in, which resolves `done`.
zr_code Submission::issue_async(const zr_coll& coll, const StagedCollective& staged, zr_done* done, bool control,
                                zr_error* error) {
  set_on_resolved(coll, staged, done, is_observed(control));
  control_->set_activity(activity_);
  const zr_code code = finish(on_host_->submit(staged.coll, nullptr, done, error), error);
  if (code == ZR_OK && staged.number) {
    done->references.fetch_add(1, std::memory_order_relaxed);
    staged_completions_.push_back(done);
  }
  activity_.what.clear();
  control_->set_activity(activity_);
  if (code != ZR_OK) {
    done->on_resolved = nullptr;
    unstage(staged.number, false);
    return code;
  }
  counter_.add(coll.op, counter_.received_bytes(coll), control);
  return ZR_OK;
}

// Sets what happens when `done` resolves: the collective is reported if it is observed, and unstaged.
void Submission::set_on_resolved(const zr_coll& coll, const StagedCollective& staged, zr_done* done, bool observed) {
  if (!observed && !staged.number) return;
  done->on_resolved = [this, coll, begin = Clock::now(), observed, number = staged.number, dst = staged.coll.dst.data,
                       issued = issued_, label = std::string(coll.label ? coll.label : "")](zr_code code) {
    zr_coll completed = coll;
    completed.label = label.c_str();
    completed.counts = completed.recv_counts = nullptr;
    if (code == ZR_OK && observed) notify_completed(completed, dst, issued, begin);
    unstage(number, code == ZR_OK);
  };
}

zr_code Submission::submit(const zr_coll& given, zr_done* done, bool control, zr_error* error, bool in_stream) {
  if (job_failure_) return fail_job("the job has failed", error);
  failure_ = nullptr;  // set by an earlier call whose caller continued
  zr_coll coll = given;
  coll.size = sizeof coll;
  const zr_device device = device_ ? device_->device() : kHostMemory;
  if (const std::string why = problem_of(coll, rank_, world_, device); !why.empty())
    return reject(ZR_INVALID, exit_code::user,
                  fmt::format("{} '{}': {}", name_of_op(coll.op), coll.label ? coll.label : "", why), error);
  coll.fingerprint = fingerprint_of(coll, world_);
  const bool on_device = device_ && (is_on_device(coll, rank_) || (in_stream && coll.op == ZR_BARRIER));
  StagedCollective staged{coll, CollectiveStaging::kNotStaged, on_device};
  if (const zr_code code = stage(staged, error); code != ZR_OK) return code;
  if (!is_message(coll)) activity_.sequence = control_->next_sequence();
  activity_.fingerprint = coll.fingerprint;
  if (world_ > 1) {
    describe(coll, world_, activity_.what, call_);
    if (control_->broken()) {
      unstage(staged.number, false);
      return fail_job("about to issue " + activity_.what, error);
    }
  }
  ++issued_;
  if (done) {
    ++submitted_;
    done->of_collective = true;
    done->sequence = activity_.sequence;
    done->fingerprint = activity_.fingerprint;
    done->what = activity_.what;
  }
  try {
    return issue(coll, staged, done, control, error);
  } catch (...) {
    unstage(staged.number, false);
    throw;
  }
}

zr_code Submission::progress(zr_error* error) { return on_host_ ? on_host_->progress(error) : zr_code{ZR_OK}; }

void Submission::run(const zr_coll& coll, bool control) {
  CallError error;
  const zr_code code = submit(coll, nullptr, control, &error);
  if (code == ZR_OK) return;
  if (const auto failure = take_failure()) std::rethrow_exception(failure);
  check(code, error, "collective");
}

zr_code Submission::wait(zr_done* done, int64_t timeout_ns, zr_error* error) {
  const zr_code code = done_poll(done, error);
  if (code == ZR_OK) return code;
  if (done->of_collective) return wait_for_collective(done, timeout_ns, error);
  failure_ = nullptr;  // of an earlier call, which this error has nothing to do with
  return code == ZR_AGAIN ? wait_for_own(done, timeout_ns, error) : code;
}

// Calls progress() until `done` is resolved or another event ends the wait. `code`: of the resolution, or of
// progress().
Submission::WaitEnd Submission::drive_until_resolved(zr_done* done, std::chrono::nanoseconds limit, zr_code& code,
                                                     zr_error* error) {
  const auto start = Clock::now();
  const bool crowded = control_->local_world() > static_cast<int>(std::thread::hardware_concurrency());
  while ((code = done_poll(done, error)) == ZR_AGAIN) {
    code = progress(error);
    if (code != ZR_OK && code != ZR_AGAIN) return WaitEnd::progress_failed;
    if (done->code.load(std::memory_order_relaxed) != ZR_AGAIN) continue;
    const auto waited = Clock::now() - start;
    if (waited > limit) return WaitEnd::timeout;
    if (control_->broken()) return WaitEnd::job_failed;
    // Yields the core if there are more ranks than cores, or after a short wait; sleeps after a long wait.
    if (waited > std::chrono::milliseconds(1))
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    else if (crowded || waited > std::chrono::microseconds(50))
      ::sched_yield();
  }
  return WaitEnd::resolved;
}

zr_code Submission::wait_for_collective(zr_done* done, int64_t timeout_ns, zr_error* error) {
  zr_code code = ZR_AGAIN;
  const std::pair issued(activity_.sequence, activity_.fingerprint);
  activity_.sequence = done->sequence ? done->sequence : activity_.sequence;
  activity_.fingerprint = done->sequence ? done->fingerprint : activity_.fingerprint;
  activity_.what = done->what;
  {
    const Waiting waiting(*this);
    const WaitEnd end = drive_until_resolved(done, limit_of(timeout_ns), code, error);
    if (end == WaitEnd::timeout && timeout_ns >= 0) {
      code = fill_error(error, ZR_TIMEOUT, kNotResolved);
    } else {
      if (end == WaitEnd::timeout) exceeded_timeout_ = true;
      if (end == WaitEnd::timeout || end == WaitEnd::job_failed)
        code = fill_error(error, ZR_CANCELLED, "the job has failed");
      code = finish(code, error, end == WaitEnd::progress_failed ? "progress" : "submit");
    }
  }
  std::tie(activity_.sequence, activity_.fingerprint) = issued;
  return code;
}

// Without the watchdog, which would abort the communicator, and without `waiting`, which means in a collective.
zr_code Submission::wait_for_own(zr_done* done, int64_t timeout_ns, zr_error* error) {
  const std::string outer = std::exchange(activity_.what, "waiting for a completion of a plug-in");
  control_->set_activity(activity_);
  zr_code code = ZR_AGAIN;
  const WaitEnd end = drive_until_resolved(done, limit_of(timeout_ns), code, error);
  activity_.what = outer;
  control_->set_activity(activity_);
  if (end == WaitEnd::resolved) return code;
  if (end == WaitEnd::progress_failed) return finish(code, error, "progress");
  if (end == WaitEnd::job_failed) return fail_job("the job has failed", error);
  return fill_error(error, ZR_TIMEOUT,
                    timeout_ns >= 0 ? std::string(kNotResolved)
                                    : fmt::format("the completion was not resolved within communicator.timeout ({})",
                                                  timeout_text()));
}

}  // namespace zr::host::comm
