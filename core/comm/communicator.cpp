#include "comm/communicator.hpp"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <numeric>
#include <thread>
#include <utility>

#include "base/dtype.hpp"
#include "base/failure.hpp"
#include "comm/coll.hpp"
#include "comm/compose.hpp"
#include "comm/done.hpp"

namespace zr::host {

namespace {
using Clock = std::chrono::steady_clock;
// Collectives of this process, over all its Communicators: what the ranks' activities are compared by.
std::atomic<uint64_t> sequence{0};

zr_code fill(zr_error* error, zr_code code, const std::string& text) {
  if (error) {
    error->code = code;
    error->native = 0;
    std::snprintf(error->msg, sizeof error->msg, "%s", text.c_str());
  }
  return code;
}

bool is_lost(zr_code code) { return code == ZR_COMM || code == ZR_TIMEOUT || code == ZR_CANCELLED || code == ZR_MISMATCH; }
}  // namespace

int64_t WireCount::total() const { return std::accumulate(bytes.begin(), bytes.end(), int64_t{0}); }

struct Communicator::State {
  struct Memory {
    int64_t bytes;
    Tier tier;
    Kind kind;
    std::string tag;
    bool from_plugin;
  };

  Host& host;
  std::shared_ptr<Control> control;
  const Instance* instance;
  const zr_communicator_api* api = nullptr;
  void* comm = nullptr;
  Options options;
  zr_comm_caps caps{};
  int rank, world;
  Activity activity;
  bool as_control = false;  // the call under way is the host's own
  std::string control_label;
  WireCount wire;
  std::vector<LiveRuns> live;
  std::map<void*, Memory> memory;
  int64_t submitted = 0;
  std::exception_ptr failure;

  State(Host& h, std::shared_ptr<Control> c, const Instance* i, Options o)
      : host(h), control(std::move(c)), instance(i), options(o), rank(control->rank()), world(control->world()) {}

  int64_t live_elements(const zr_view& view) const {
    const char* at = bytes_of(view);
    for (const LiveRuns& runs : live) {
      const int64_t size = size_of(runs.dtype);
      if (runs.dtype != view.dtype || at < runs.base || at >= runs.base + runs.elements * size) continue;
      const int64_t begin = (at - runs.base) / size, end = begin + view.count;
      auto run = std::partition_point(runs.runs.begin(), runs.runs.end(), [&](const auto& r) { return r.second <= begin; });
      int64_t elements = 0;
      for (; run != runs.runs.end() && run->first < end; ++run) elements += std::min(run->second, end) - std::max(run->first, begin);
      return elements;
    }
    return view.count;
  }

  void count(const zr_coll& coll) {
    const int64_t bytes = received_bytes(coll, rank, world, [this](const zr_view& view) { return live_elements(view); });
    if (as_control) {
      wire.control_bytes += bytes;
    } else {
      wire.bytes[coll.op] += bytes;
      ++wire.calls[coll.op];
    }
  }

  // The job is lost for this rank: gathers the report, and keeps it as a Failure for whoever asks.
  zr_code lost(const std::string& mine, zr_error* error) {
    const std::string text = control->report(mine);
    failure = std::make_exception_ptr(Failure(Exit::peer_lost, text));
    return fill(error, ZR_COMM, mine);
  }

  // The plug-in does this operation itself, in the order NUMERICS.md asks for.
  bool native(const zr_coll& coll) const {
    if (world == 1 || !(caps.ops & (uint64_t{1} << coll.op))) return false;
    if (coll.op != ZR_ALL_REDUCE && coll.op != ZR_REDUCE_SCATTER && coll.op != ZR_REDUCE) return true;
    if (!(caps.flags & ZR_COMM_RANK_ORDERED) && coll.reduce == ZR_SUM) return false;
    if ((coll.flags & ZR_COLL_ACCUMULATE) && !(caps.flags & ZR_COMM_ACCUMULATE)) return false;
    const zr_dtype dst = coll.op == ZR_REDUCE && rank != coll.root ? coll.src.dtype : coll.dst.dtype;
    return coll.op == ZR_REDUCE ? (caps.flags & ZR_COMM_WIDEN) || coll.src.dtype == ZR_F32 : coll.src.dtype == dst || (caps.flags & ZR_COMM_WIDEN);
  }

  zr_code composed(const zr_coll& coll, zr_error* error) {
    zr_code code = ZR_OK;
    const auto gather = [&](const zr_view& src, const zr_view& dst) {
      if (world == 1) {
        if (src.count > 0) std::memmove(dst.data, src.data, static_cast<std::size_t>(src.count * size_of(src.dtype)));
        return;
      }
      if (code != ZR_OK) return;
      zr_coll all{};
      all.size = sizeof all;
      all.op = ZR_ALL_GATHER;
      all.src = src;
      all.dst = dst;
      all.fingerprint = coll.fingerprint;
      all.label = coll.label;
      code = finished(all, error);
    };
    const std::string why = compose(coll, rank, world, gather);
    if (code != ZR_OK) return code;
    return why.empty() ? zr_code{ZR_OK} : fill(error, ZR_UNSUPPORTED, (instance ? instance->who("submit") : "one rank") + ": " + why);
  }

  // Submits to the plug-in and waits.
  zr_code finished(const zr_coll& coll, zr_error* error) {
    if (!(caps.flags & ZR_COMM_ASYNC)) return failed(api->submit(comm, &coll, nullptr, nullptr, error), error);
    const std::unique_ptr<zr_done, decltype(&done_release)> done(done_new(host.abi()), &done_release);
    const zr_code code = failed(api->submit(comm, &coll, nullptr, done.get(), error), error);
    return code == ZR_OK ? wait(done.get(), -1, error) : code;
  }

  // A plug-in's code: loss of the job is reported, the rest is named.
  zr_code failed(zr_code code, zr_error* error) {
    if (code == ZR_OK) return ZR_OK;
    if (is_lost(code)) return lost(activity.what + ": " + error->msg, error);
    return fill(error, code, instance->who("submit") + ": " + error->msg);
  }

  void set_waiting(bool waiting) {
    if (activity.waiting == waiting) return;
    activity.waiting = waiting;
    control->set_activity(activity);
  }

  zr_code wait(zr_done* done, int64_t timeout_ns, zr_error* error) {
    const zr_code code = waited(done, timeout_ns, error);
    if (code == ZR_OK) set_waiting(false);
    return code;
  }

  zr_code waited(zr_done* done, int64_t timeout_ns, zr_error* error) {
    const auto start = Clock::now();
    const auto limit = timeout_ns < 0 ? std::chrono::nanoseconds(options.timeout) : std::chrono::nanoseconds(timeout_ns);
    const bool crowded = control->local_world() > static_cast<int>(std::thread::hardware_concurrency());
    for (int64_t turn = 0;; ++turn) {
      zr_code code = done_poll(done, error);
      if (code != ZR_AGAIN) return failed(code, error);
      if (api && api->progress) {
        code = api->progress(comm, error);
        if (code != ZR_OK && code != ZR_AGAIN) return failed(code, error);
      }
      if (done_poll(done, error) != ZR_AGAIN) continue;
      if (control->broken()) return lost("waited in " + activity.what, error);
      if (turn == 0) set_waiting(true);
      if (turn < (crowded ? 16 : 4096)) continue;
      if (turn % 64 == 0) {
        const auto waited = Clock::now() - start;
        if (waited > limit && timeout_ns < 0)
          return lost("waited " + std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(waited).count()) + " ms in " + activity.what, error);
        if (waited > limit) return fill(error, ZR_TIMEOUT, "the completion did not come in time");
        // Long waits leave the core to whom they wait for.
        if (waited > std::chrono::milliseconds(2)) std::this_thread::sleep_for(std::chrono::microseconds(50));
      }
      ::sched_yield();
    }
  }

  zr_code submit(const zr_coll& given, zr_done* done, zr_error* error) {
    zr_coll coll = given;
    coll.size = sizeof coll;
    if (coll.op == 0 || coll.op > ZR_BARRIER) return fill(error, ZR_INVALID, "collective " + std::to_string(coll.op) + " is none");
    const bool pair = coll.op == ZR_SEND || coll.op == ZR_RECV;
    coll.fingerprint = fingerprint_of(coll, rank, world);
    if (!pair) activity.sequence = ++sequence;
    activity.fingerprint = coll.fingerprint;
    const bool goes_on = done && native(coll) && (caps.flags & ZR_COMM_ASYNC);
    activity.waiting = !goes_on;
    describe(coll, total_of(coll, rank, world), activity.what);
    control->set_activity(activity);
    count(coll);
    zr_code code;
    submitted += done != nullptr;
    if (goes_on) return failed(api->submit(comm, &coll, nullptr, done, error), error);
    code = native(coll) ? finished(coll, error) : composed(coll, error);
    if (code == ZR_OK && done) done_resolve(done, ZR_OK, 0, nullptr);
    set_waiting(false);
    return code;
  }

  static zr_code abi_submit(void* self, const zr_coll* coll, zr_stream*, zr_done* done, zr_error* error) noexcept {
    try {
      return static_cast<State*>(self)->submit(*coll, done, error);
    } catch (const std::exception& e) {
      return fill(error, ZR_INTERNAL, e.what());
    }
  }
  static zr_code abi_progress(void* self, zr_error* error) noexcept {
    auto& state = *static_cast<State*>(self);
    if (!state.api || !state.api->progress) return ZR_OK;
    const zr_code code = state.api->progress(state.comm, error);
    return code == ZR_AGAIN ? zr_code{ZR_OK} : state.failed(code, error);
  }
  static zr_code abi_caps(void* self, zr_comm_caps* caps, zr_error*) noexcept {
    const zr_comm_caps all{sizeof(zr_comm_caps), ZR_COMM_RANK_ORDERED | ZR_COMM_WIDEN | ZR_COMM_ACCUMULATE | ZR_COMM_ASYNC, (uint64_t{2} << ZR_BARRIER) - 2,
                           static_cast<State*>(self)->caps.dtypes, 14};
    const uint32_t size = std::min<uint32_t>(caps->size, sizeof all);
    std::memcpy(caps, &all, size);
    caps->size = size;
    return ZR_OK;
  }
};

Communicator::Communicator(Host& host, std::shared_ptr<Control> control, const Instance* instance, Options options)
    : state_(std::make_unique<State>(host, std::move(control), instance, options)) {
  State& s = *state_;
  s.caps.dtypes = ~uint64_t{0};
  host.set_context("communicator", this);
  if (s.world == 1) return;
  if (!instance) fail_bug("a communicator of " + std::to_string(s.world) + " ranks was made without a plug-in");
  s.api = instance->api<zr_communicator_api>();
  const zr_comm_open how{sizeof(zr_comm_open), s.rank, s.world, 0, "data"};
  CallError error;
  check(s.api->open(instance->self(), &how, &s.comm, &error), error, instance->who("open"));
  s.caps.size = sizeof s.caps;
  check(s.api->caps(s.comm, &s.caps, &error), error, instance->who("caps"));
  if (!(s.caps.ops & (uint64_t{1} << ZR_ALL_GATHER))) fail_environment(instance->who("caps") + ": offers no all_gather, of which all else could be made");
  s.control->on_broken([state = state_.get()] { state->api->abort(state->comm); });
}

Communicator::~Communicator() {
  State& s = *state_;
  s.host.set_context("communicator", nullptr);
  if (s.world > 1 && s.comm) {
    s.control->on_broken({});
    s.api->close(s.comm);
  }
  for (auto& [memory, m] : s.memory)
    if (!m.from_plugin) ::operator delete(memory, std::align_val_t{4096});
}

int Communicator::rank() const { return state_->rank; }
int Communicator::world() const { return state_->world; }

zr_comm_ref Communicator::ref() const {
  static const zr_communicator_api table{sizeof(zr_communicator_api), 0,       nullptr, nullptr, State::abi_caps, State::abi_submit,
                                         State::abi_progress,         nullptr, nullptr, nullptr};
  return {&table, state_.get(), state_->rank, state_->world};
}

void Communicator::run(zr_coll coll) {
  CallError error;
  const zr_code code = state_->submit(coll, nullptr, &error);
  if (code == ZR_OK) return;
  if (const auto failure = take_failure()) std::rethrow_exception(failure);
  check(code, error, "collective");
}

void Communicator::run_control(zr_coll coll) {
  state_->as_control = true;
  try {
    run(coll);
  } catch (...) {
    state_->as_control = false;
    throw;
  }
  state_->as_control = false;
}

void Communicator::barrier(const char* label) {
  zr_coll coll{};
  coll.op = ZR_BARRIER;
  coll.label = label;
  run_control(coll);
}

std::vector<std::string> Communicator::all_gather_bytes(const std::string& mine, const char* label) {
  const auto n = static_cast<int64_t>(mine.size());
  std::string all(mine.size() * static_cast<std::size_t>(world()), '\0');
  zr_coll coll{};
  coll.op = ZR_ALL_GATHER;
  coll.src = {const_cast<char*>(mine.data()), n, ZR_U8, 0, {1, 0}};
  coll.dst = {all.data(), n * world(), ZR_U8, 0, {1, 0}};
  coll.label = label;
  run_control(coll);
  std::vector<std::string> list;
  for (int r = 0; r < world(); ++r) list.push_back(all.substr(static_cast<std::size_t>(r) * mine.size(), mine.size()));
  return list;
}

std::string Communicator::broadcast_bytes(const std::string& mine, int root, const char* label) {
  auto length = static_cast<int64_t>(mine.size());
  zr_coll coll{};
  coll.op = ZR_BROADCAST;
  coll.root = root;
  coll.label = label;
  coll.src = coll.dst = {&length, 1, ZR_I64, 0, {1, 0}};
  run_control(coll);
  std::string bytes = rank() == root ? mine : std::string(static_cast<std::size_t>(length), '\0');
  if (length == 0) return bytes;
  coll.src = coll.dst = {bytes.data(), length, ZR_U8, 0, {1, 0}};
  run_control(coll);
  return bytes;
}

void* Communicator::allocate(int64_t bytes, int64_t align, Tier tier, Kind kind, const std::string& tag) {
  State& s = *state_;
  const auto room = static_cast<uint64_t>(std::max<int64_t>(bytes, 64));
  void* memory = nullptr;
  const bool from_plugin = s.world > 1 && s.api->mem_alloc;
  if (from_plugin) {
    CallError error;
    check(s.api->mem_alloc(s.comm, room, static_cast<uint64_t>(align), 0, &memory, &error), error, s.instance->who("mem_alloc"));
  } else {
    memory = ::operator new(room, std::align_val_t{4096});
    if (room >= (uint64_t{4} << 20)) ::madvise(memory, room, MADV_HUGEPAGE);
    std::memset(memory, 0, room);
  }
  s.memory.emplace(memory, State::Memory{bytes, tier, kind, tag, from_plugin});
  s.host.ledger().add(tier, kind, tag, bytes);
  return memory;
}

void Communicator::free(void* memory) {
  State& s = *state_;
  const auto at = s.memory.find(memory);
  if (at == s.memory.end()) return;
  s.host.ledger().add(at->second.tier, at->second.kind, at->second.tag, -at->second.bytes);
  if (at->second.from_plugin) {
    if (s.api->mem_free) s.api->mem_free(s.comm, memory);
  } else {
    ::operator delete(memory, std::align_val_t{4096});
  }
  s.memory.erase(at);
  const auto* base = static_cast<const char*>(memory);
  std::erase_if(s.live, [&](const LiveRuns& runs) { return runs.base == base; });
}

void Communicator::note_step(int64_t step) { state_->activity.step = step; }
void Communicator::set_live(LiveRuns live) { state_->live.push_back(std::move(live)); }
WireCount Communicator::wire() const { return state_->wire; }
int64_t Communicator::submitted() const { return state_->submitted; }
void Communicator::abort() {
  if (state_->comm) state_->api->abort(state_->comm);
}
std::exception_ptr Communicator::take_failure() { return std::exchange(state_->failure, nullptr); }
zr_code Communicator::wait(zr_done* done, int64_t timeout_ns, zr_error* error) { return state_->wait(done, timeout_ns, error); }

}  // namespace zr::host
