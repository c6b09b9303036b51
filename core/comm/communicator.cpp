#include "comm/communicator.hpp"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/failure.hpp"
#include "base/page_memory.hpp"
#include "base/text.hpp"
#include "comm/submission.hpp"

namespace zr::host {

namespace {
constexpr int64_t kMessageRun = 64;  // bytes of a rank that travel at a time at least
}

// Memory and messages around the submission of collectives.
struct Communicator::State {
  struct Memory {
    int64_t bytes;
    Tier tier;
    Kind kind;
    std::string tag;
    enum class From { host, plugin, alias } from;
    PageMemory own;  // the host's
  };

  State(Host& h, std::shared_ptr<Control> control, const Instance* instance, Options options)
      : host(h), submission(h, std::move(control), instance, options.timeout) {
    room_bytes = Communicator::room_bytes(submission.world());
  }

  // Calls fn(first, count) over [0, total) in runs of which `shares` fit the room.
  template <class Fn>
  void in_runs(int64_t total, int64_t shares, Fn&& fn) {
    const int64_t run = room_bytes / shares / kMessageRun * kMessageRun;
    for (int64_t first = 0; first < total; first += run) fn(first, std::min(run, total - first));
  }

  Host& host;
  Submission submission;
  std::map<void*, Memory> memory;
  char* room = nullptr;  // the host's own words travel in it
  int64_t room_bytes;
};

Communicator::Communicator(Host& host, std::shared_ptr<Control> control, const Instance* instance, Options options) {
  Ledger& ledger = host.ledger();
  const int64_t before = ledger.held(Tier::host, Kind::communicator);
  state_ = std::make_unique<State>(host, std::move(control), instance, options);
  // What the plug-in takes when it opens is its plan; more later would show as a peak above it.
  ledger.plan(Tier::host, Kind::communicator,
              ledger.held(Tier::host, Kind::communicator) - before + state_->room_bytes);
  state_->room =
      static_cast<char*>(allocate(state_->room_bytes, 64, Tier::host, Kind::communicator, "control messages"));
  state_->submission.set_room([this, &ledger] {
    ledger.plan(Tier::host, Kind::communicator, Submission::kRoom);
    return static_cast<char*>(allocate(Submission::kRoom, 64, Tier::host, Kind::communicator, "composed collectives"));
  });
  host.set_context("communicator", this);
}

Communicator::~Communicator() {
  State& s = *state_;
  s.host.set_context("communicator", nullptr);
  s.submission.close();
  for (auto& [memory, m] : s.memory) s.host.ledger().add(m.tier, m.kind, m.tag, -m.bytes);
}

int64_t Communicator::room_bytes(int world) { return std::max<int64_t>(64 << 10, kMessageRun * (world + 1)); }
int Communicator::rank() const { return state_->submission.rank(); }
int Communicator::world() const { return state_->submission.world(); }
zr_comm_ref Communicator::ref() const { return state_->submission.ref(); }
void Communicator::run(zr_coll coll) { state_->submission.run(coll, false); }
void Communicator::run_control(zr_coll coll) { state_->submission.run(coll, true); }

void Communicator::barrier(const char* label) {
  zr_coll coll{};
  coll.op = ZR_BARRIER;
  coll.label = label;
  run_control(coll);
}

std::vector<std::string> Communicator::all_gather_bytes(const std::string& mine, const char* label) {
  const int n = world();
  const auto length = static_cast<int64_t>(mine.size());
  std::vector<std::string> all(static_cast<std::size_t>(n), std::string(mine.size(), '\0'));
  state_->in_runs(length, n + 1, [&](int64_t first, int64_t count) {
    char* own = state_->room + n * count;
    std::memcpy(own, mine.data() + first, static_cast<std::size_t>(count));
    zr_coll coll{};
    coll.op = ZR_ALL_GATHER;
    coll.src = {own, count, ZR_U8, 0, {1, 0}};
    coll.dst = {state_->room, n * count, ZR_U8, 0, {1, 0}};
    coll.label = label;
    run_control(coll);
    for (int r = 0; r < n; ++r)
      std::memcpy(all[static_cast<std::size_t>(r)].data() + first, state_->room + r * count,
                  static_cast<std::size_t>(count));
  });
  return all;
}

std::string Communicator::broadcast_bytes(const std::string& mine, int root, const char* label) {
  zr_coll coll{};
  coll.op = ZR_BROADCAST;
  coll.root = root;
  coll.label = label;
  auto length = static_cast<int64_t>(mine.size());
  std::memcpy(state_->room, &length, sizeof length);
  coll.src = coll.dst = {state_->room, 1, ZR_I64, 0, {1, 0}};
  run_control(coll);
  std::memcpy(&length, state_->room, sizeof length);
  std::string bytes = rank() == root ? mine : std::string(static_cast<std::size_t>(length), '\0');
  state_->in_runs(length, 1, [&](int64_t first, int64_t count) {
    if (rank() == root) std::memcpy(state_->room, mine.data() + first, static_cast<std::size_t>(count));
    coll.src = coll.dst = {state_->room, count, ZR_U8, 0, {1, 0}};
    run_control(coll);
    std::memcpy(bytes.data() + first, state_->room, static_cast<std::size_t>(count));
  });
  return bytes;
}

void* Communicator::allocate(int64_t bytes, int64_t align, Tier tier, Kind kind, const std::string& tag) {
  State& s = *state_;
  const int64_t room = std::max<int64_t>(bytes, 64);
  void* memory =
      s.submission.mem_alloc(static_cast<uint64_t>(room), static_cast<uint64_t>(std::max<int64_t>(align, 64)));
  PageMemory own;
  if (!memory) {
    own = page_memory(room, align);
    if (!own)
      fail_environment("no memory for " + tag + ": " + bytes_text(bytes) +
                       " are needed on each rank; use more ranks or a smaller model");
    memory = std::memset(own.get(), 0, static_cast<std::size_t>(room));
  }
  const auto from = own ? State::Memory::From::host : State::Memory::From::plugin;
  s.memory.emplace(memory, State::Memory{bytes, tier, kind, tag, from, std::move(own)});
  try {
    s.host.ledger().add(tier, kind, tag, bytes);
  } catch (...) {  // it is counted then, too
    free(memory);
    throw;
  }
  return memory;
}

void Communicator::free(void* memory) {
  State& s = *state_;
  const auto at = s.memory.find(memory);
  if (at == s.memory.end()) return;
  s.host.ledger().add(at->second.tier, at->second.kind, at->second.tag, -at->second.bytes);
  switch (at->second.from) {
    case State::Memory::From::plugin: s.submission.mem_free(memory); break;
    case State::Memory::From::alias: s.submission.alias_free(memory); break;
    case State::Memory::From::host: break;
  }
  s.memory.erase(at);
  s.submission.counter().forget(memory);
}

std::pair<void*, const void*> Communicator::allocate_alias(int64_t bytes, int64_t share, Tier tier, Kind kind,
                                                           const std::string& tag) {
  State& s = *state_;
  const auto views = s.submission.alias_alloc(static_cast<uint64_t>(std::max<int64_t>(bytes, 64)));
  s.memory.emplace(views.first, State::Memory{share, tier, kind, tag, State::Memory::From::alias, {}});
  s.host.ledger().add(tier, kind, tag, share);
  return views;
}

void Communicator::set_live(LiveRuns live) { state_->submission.counter().set_live(std::move(live)); }
WireCount Communicator::wire() const { return state_->submission.counter().count(); }
void Communicator::note_step(int64_t step) { state_->submission.note_step(step); }
int64_t Communicator::submitted() const { return state_->submission.submitted(); }
void Communicator::on_end(std::function<void(const zr_coll&, const void*)> ended) {
  state_->submission.on_end(std::move(ended));
}
void Communicator::set_paged(Paged* paged) { state_->submission.set_paged(paged); }
void Communicator::set_trace(Trace* trace) { state_->submission.set_trace(trace); }
void Communicator::set_call(std::string call) { state_->submission.set_call(std::move(call)); }
const std::string& Communicator::call() const { return state_->submission.call(); }
void Communicator::abort() { state_->submission.abort(); }
std::exception_ptr Communicator::take_failure() { return state_->submission.take_failure(); }
zr_code Communicator::wait(zr_done* done, int64_t timeout_ns, zr_error* error) {
  return state_->submission.wait(done, timeout_ns, error);
}

}  // namespace zr::host
