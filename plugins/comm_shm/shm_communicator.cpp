#include "shm_communicator.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <sstream>

#include "zr/collective.hpp"

namespace shm {

namespace {
using Clock = std::chrono::steady_clock;
using State = Operation::State;
constexpr auto kSpin = std::chrono::microseconds(50);  // about the cost of a wake-up; only if each rank has a core
constexpr timespec kNap{0, 1000000};                   // the longest time until abort() is noticed

bool more_ranks_than_cores(int world) {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 && world > CPU_COUNT(&set);
}

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

long futex(std::atomic<uint32_t>* word, int op, uint32_t value, const timespec* limit) {
  return ::syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), op, value, limit, nullptr, 0);
}
}  // namespace

ShmCommunicator::ShmCommunicator(const zr::Host& host, const zr_comm_open& options, int64_t staging_bytes,
                                 const RanksOfJob& ranks)
    : host_(host),
      tasks_(host),
      rank_(options.rank),
      world_(options.world),
      arena_(host, options.rank, options.world, staging_bytes, ranks.first),
      uses_tasks_(ranks.use_tasks),
      reduce_(ZR_CHOOSE(reduce_ranks)),
      copy_(ZR_CHOOSE(copy_range)),
      oversubscribed_(more_ranks_than_cores(options.world)),
      messages_sent_(static_cast<size_t>(options.world), 0) {
  rendezvous(options);
}

void ShmCommunicator::rendezvous(const zr_comm_open& options) {
  if (world_ == 1) return;
  const auto& store = host_.need<zr_store_service>();
  const auto key = [&](const char* what, int r) {
    return std::string(options.store_prefix) + "shm." + what + "." + std::to_string(r);
  };
  const auto put = [&](const char* what, const std::string& value) {
    zr_error error = zr::no_error();
    zr::check(store.put(host_.abi(), key(what, rank_).c_str(), value.data(), value.size(), &error), error);
  };
  const auto get = [&](const char* what, int r) {
    char value[1024];
    uint64_t bytes = sizeof value;
    zr_error error = zr::no_error();
    zr::check(store.get(host_.abi(), key(what, r).c_str(), -1, value, &bytes, &error), error);
    return std::string(value, bytes);
  };
  const MemoryFileAddress own_address = arena_.address();
  std::ostringstream text;
  text << own_address.boot << ' ' << own_address.container << ' ' << own_address.pid << ' ' << own_address.fd << ' '
       << own_address.identity << ' ' << own_address.host;
  put("address", text.str());
  for (int r = 0; r < world_; ++r) {
    if (r == rank_) continue;
    MemoryFileAddress peer;
    std::istringstream address(get("address", r));
    if (!(address >> peer.boot >> peer.container >> peer.pid >> peer.fd >> peer.identity >> peer.host))
      throw zr::PluginError(ZR_COMM, arena_.name_of(r) +
                                         " announced an address that comm_shm cannot parse; use the same version of "
                                         "Zeroth on all ranks");
    arena_.connect(r, peer);
  }
  // No rank may leave, or write to a peer's memory, before all ranks have opened each other's memory.
  put("met", "");
  for (int r = 0; r < world_; ++r)
    if (r != rank_) get("met", r);
}

ShmCommunicator::~ShmCommunicator() {
  for (const auto& op : queue_)
    if (op->done && op->state != State::complete)
      op->done.resolve(ZR_CANCELLED, 0, (op->what() + ": the communicator was closed").c_str());
  arena_.counters(rank_).closed.store(1, std::memory_order_release);
  notify_peers();
}

zr_view ShmCommunicator::mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
  if (flags != 0)
    throw zr::PluginError(ZR_UNSUPPORTED, "comm_shm does not support memory with flags " + std::to_string(flags));
  if (align > 4096)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "comm_shm cannot align memory to " + std::to_string(align) + " bytes; the limit is 4096");
  return {arena_.allocate(bytes), static_cast<int64_t>(bytes), ZR_U8, 0, {ZR_DEVICE_CPU, 0}};
}

void ShmCommunicator::mem_free(const zr_view& memory) noexcept { arena_.release(memory.data); }

void ShmCommunicator::shared_alloc(uint64_t bytes, void** writer, const void** reader) {
  SharedBlock block;
  begin_shared(bytes, &block, nullptr);
  map_shared(block, writer, reader);
}

// Rank 0 allocates the memory and broadcasts its address. If it fails, all ranks do.
void ShmCommunicator::begin_shared(uint64_t bytes, SharedBlock* block, zr_done* done) {
  if (rank_ == 0) try {
      block->own = arena_.allocate(bytes);
      block->address = arena_.address_of(block->own, static_cast<int64_t>(bytes));
    } catch (const zr::PluginError& failure) {
      block->failure = failure;
    } catch (const std::exception& failure) {  // the other ranks wait for the address
      block->failure = zr::PluginError(ZR_NOMEM, failure.what());
    }
  const zr_view view{&block->address, static_cast<int64_t>(sizeof block->address), ZR_U8, 0, {1, 0}};
  submit(zr::broadcast(view, 0, "address of shared memory"), nullptr, done);
}

void ShmCommunicator::map_shared(const SharedBlock& block, void** writer, const void** reader) {
  if (block.failure) throw *block.failure;
  if (block.address.segment == kNowhere)
    throw zr::PluginError(ZR_NOMEM, arena_.name_of(0) + " cannot allocate the memory that the ranks of its host share");
  *writer = block.own ? block.own : arena_.at(0, block.address);
  *reader = arena_.map_reader(0, block.address, *writer);
}

void ShmCommunicator::shared_free(void* writer) noexcept { arena_.release_reader(writer); }

void ShmCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  if (stream) throw zr::PluginError(ZR_UNSUPPORTED, "comm_shm does not accept streams");
  if (failed_) throw zr::PluginError(failed_->code, failed_->text);
  auto op = unused_.empty() ? std::make_unique<Operation>() : std::move(unused_.back());
  if (!unused_.empty()) unused_.pop_back();
  op->assign(coll, rank_, world_);
  op->done = zr::Done::retained(host_, done);
  queue_.push_back(std::move(op));
  const Operation& submitted = *queue_.back();
  submitting_ = &submitted;
  if (done)
    advance();
  else
    wait(submitted);
  submitting_ = nullptr;
}

void ShmCommunicator::progress() {
  if (failed_) throw zr::PluginError(failed_->code, failed_->text);
  advance();
}

void ShmCommunicator::advance() try { advance_operations(); } catch (const zr::PluginError& error) {
  if (failed_) throw;
  fail(error.code(), error.what());  // an operation failed, so no later one can be executed
}

void ShmCommunicator::advance_operations() {
  if (aborted_.load(std::memory_order_relaxed)) fail(ZR_CANCELLED, "the communicator was aborted");
  const int peer = blocked_on_;
  const bool closed = peer >= 0 && arena_.counters(peer).closed.load(std::memory_order_acquire) != 0;
  blocked_on_ = -1;
  bool moved = true;
  while (moved) {
    moved = false;
    for (const auto& op : queue_)
      while (op->state != State::complete && step(*op)) moved = true;
  }
  resolve_completed();
  if (closed && blocked_on_ == peer)
    fail(ZR_COMM,
         arena_.name_of(peer) + " has closed its communicator while this rank is in " + queue_.front()->what());
}

// Advances one operation by one state; false if it has to wait.
bool ShmCommunicator::step(Operation& op) {
  switch (op.state) {
    case State::waiting:
      if (!may_announce(op)) return false;
      if (op.coll.op == ZR_SEND) {
        if (!announce_message(op)) return false;
      } else if (!op.is_message()) {
        announce(op);
      }
      op.state = State::announced;
      return true;
    case State::announced:
      if (op.is_message()) return op.coll.op == ZR_SEND ? send(op) : receive(op);
      if (op.number != executed_ + 1 || !all_reached(&SharedCounters::posted, op.number) || !execute(op)) return false;
      executed_ = op.number;
      op.state = State::executed;
      publish(&SharedCounters::finished, op.number);
      return true;
    case State::executed:
      if (!is_complete(op)) return false;
      op.state = State::complete;
      return true;
    case State::complete: return false;
  }
  return false;
}

bool ShmCommunicator::may_announce(const Operation& op) {
  // Collectives are announced in order, and so are messages to the same peer.
  for (const auto& earlier : queue_) {
    if (earlier.get() == &op) break;
    if (earlier->blocks(op)) return false;
    if (earlier->state != State::waiting || earlier->is_message() != op.is_message()) continue;
    if (!op.is_message() || (earlier->coll.op == op.coll.op && earlier->coll.peer == op.coll.peer)) return false;
  }
  if (op.is_message()) return true;
  // The ring entry can be reused once all ranks have read its previous announcement.
  const uint64_t number = announced_ + 1;
  return number <= kRing || (executed_ >= number - kRing && all_reached(&SharedCounters::finished, number - kRing));
}

void ShmCommunicator::announce(Operation& op) {
  op.number = ++announced_;
  Announcement& announcement = arena_.announcement(rank_, op.number);
  announcement.number = op.number;
  announcement.fingerprint = op.coll.fingerprint;
  announcement.op = op.coll.op;
  announcement.traits = (op.in_place ? kInPlace : 0u) | (world_ == 1 ? kSrcShared | kDstShared : 0u);
  announcement.dst_dtype = op.receives(rank_) ? op.coll.dst.dtype : zr_dtype{ZR_NONE};
  announcement.src = op.sends(rank_) ? arena_.address_of(op.coll.src.data, op.src_bytes()) : ShmAddress{};
  announcement.dst = op.receives(rank_) ? arena_.address_of(op.coll.dst.data, op.dst_bytes()) : ShmAddress{};
  if (announcement.src.segment != kNowhere || !op.sends(rank_) || op.coll.src.count == 0)
    announcement.traits |= kSrcShared;
  if (announcement.dst.segment != kNowhere || !op.receives(rank_) || op.coll.dst.count == 0)
    announcement.traits |= kDstShared;
  announcement.dtype = op.dtype();
  announcement.elements = op.elements();
  const size_t length = std::min(op.label.size(), sizeof announcement.label - 1);
  op.label.copy(announcement.label, length);
  announcement.label[length] = 0;
  if (op.coll.op == ZR_ALL_TO_ALL) {
    std::copy(op.counts.begin(), op.counts.end(), announcement.to());
    std::copy(op.recv_counts.begin(), op.recv_counts.end(), announcement.to() + world_);
  }
  publish(&SharedCounters::posted, op.number);
}

bool ShmCommunicator::is_complete(const Operation& op) {
  switch (op.finish) {
    case Operation::Finish::no_rank: return true;
    case Operation::Finish::root: return reached(op.coll.root, &SharedCounters::finished, op.number);
    case Operation::Finish::all: return all_reached(&SharedCounters::finished, op.number);
  }
  return true;
}

void ShmCommunicator::resolve_completed() {
  size_t n = 0;
  for (; n < queue_.size() && queue_[n]->state == State::complete; ++n) {
    if (queue_[n]->done) queue_[n]->done.resolve();
    queue_[n]->done = zr::Done();
    unused_.push_back(std::move(queue_[n]));
  }
  if (n) queue_.erase(queue_.begin(), queue_.begin() + static_cast<std::ptrdiff_t>(n));
}

void ShmCommunicator::fail(zr_code code, const std::string& text) {
  failed_ = Failed{code, text};
  for (auto& op : queue_) {
    // The caller of submit() gets the error from submit() itself.
    if (op->done && op.get() != submitting_)
      op->done.resolve(op->state == State::complete ? zr_code{ZR_OK} : code, 0, text.c_str());
    op->done = zr::Done();
  }
  queue_.clear();
  submitting_ = staging_user_ = nullptr;
  throw zr::PluginError(code, text);
}

void ShmCommunicator::wait(const Operation& op) {
  std::optional<Clock::time_point> since;
  for (;;) {
    const int peer = blocked_on_;
    const uint32_t seen = peer < 0 ? 0 : arena_.counters(peer).changes.load(std::memory_order_acquire);
    advance();
    if (op.state == State::complete) return;
    if (blocked_on_ < 0 || blocked_on_ != peer) continue;
    if (!since) since = Clock::now();
    const auto& changes = arena_.counters(peer).changes;
    for (int i = 0; i < 64 && !oversubscribed_ && changes.load(std::memory_order_acquire) == seen; ++i) relax();
    if (changes.load(std::memory_order_acquire) == seen && (oversubscribed_ || Clock::now() - *since > kSpin))
      sleep(peer, seen);
  }
}

void ShmCommunicator::sleep(int peer, uint32_t seen) {
  SharedCounters& counters = arena_.counters(peer);
  if (oversubscribed_) {
    ::sched_yield();
    if (counters.changes.load(std::memory_order_acquire) != seen) return;
  }
  counters.sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (counters.changes.load(std::memory_order_seq_cst) == seen) futex(&counters.changes, FUTEX_WAIT, seen, &kNap);
  counters.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

bool ShmCommunicator::reached(int r, Counter SharedCounters::*counter, uint64_t value) {
  if (r == rank_ || (arena_.counters(r).*counter).load(std::memory_order_acquire) >= value) return true;
  blocked_on_ = r;
  return false;
}

bool ShmCommunicator::all_reached(Counter SharedCounters::*counter, uint64_t value) {
  for (int r = 0; r < world_; ++r)
    if (!reached(r, counter, value)) return false;
  return true;
}

void ShmCommunicator::publish(Counter SharedCounters::*counter, uint64_t value) {
  (arena_.counters(rank_).*counter).store(value, std::memory_order_release);
  notify_peers();
}

void ShmCommunicator::notify_peers() {
  SharedCounters& counters = arena_.counters(rank_);
  counters.changes.fetch_add(1, std::memory_order_seq_cst);
  if (counters.sleepers.load(std::memory_order_seq_cst) != 0) futex(&counters.changes, FUTEX_WAKE, INT32_MAX, nullptr);
}

}  // namespace shm
