#include "mpi_communicator.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace mpi {

namespace {
constexpr const char* kTag = "pieces of reductions";
constexpr auto kOpenLimit = std::chrono::seconds(60);  // once all ranks have called open()
}  // namespace

MpiCommunicator::MpiCommunicator(const zr::Host& host, const zr_comm_open& options, MpiThread* thread)
    : host_(host),
      thread_(thread),
      pieces_(static_cast<std::size_t>(Transfer::buffer_bytes(options.world))),
      channel_{MPI_COMM_NULL,  MPI_COMM_NULL, options.rank,           options.world, 0,
               pieces_.data(), false,         ZR_CHOOSE(reduce_ranks)} {
  if (!thread_) return;
  meet(options);
  open_channel(options);
  thread_->add(*this);
  host_.need<zr_memory_service>().account(host_.abi(), kTag, static_cast<int64_t>(pieces_.size()));
}

// Waits for all ranks where the control plane notices if one is lost: MPI would wait for ever.
void MpiCommunicator::meet(const zr_comm_open& options) {
  const auto& store = host_.need<zr_store_service>();
  const auto key = [&](int rank) { return std::string(options.store_prefix) + "mpi.met." + std::to_string(rank); };
  zr_error error = zr::no_error();
  zr::check(store.put(host_.abi(), key(options.rank).c_str(), "", 0, &error), error);
  for (int rank = 0; rank < options.world; ++rank) {
    char value = 0;
    uint64_t bytes = sizeof value;
    zr::check(store.get(host_.abi(), key(rank).c_str(), -1, &value, &bytes, &error), error);
  }
}

void MpiCommunicator::open_channel(const zr_comm_open& options) {
  MPI_Request requests[2];
  thread_->run([&] {
    int rank = 0, world = 0, found = 0;
    int* limit = nullptr;
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &world), "MPI_Comm_size");
    if (rank != options.rank || world != options.world)
      throw zr::PluginError(ZR_INVALID, "this process is rank " + std::to_string(options.rank) + " of " +
                                            std::to_string(options.world) + " of the job, but rank " +
                                            std::to_string(rank) + " of " + std::to_string(world) +
                                            " of MPI; start the job with one mpirun, without other variables of ranks");
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &found), "MPI_TAG_UB");
    tag_limit_ = found ? *limit : 32767;
    channel_.tags = std::min<uint64_t>(static_cast<uint64_t>(tag_limit_), 1 << 20);
    check(MPI_Comm_idup(MPI_COMM_WORLD, &channel_.collectives, &requests[0]), "MPI_Comm_idup");
    check(MPI_Comm_idup(MPI_COMM_WORLD, &channel_.messages, &requests[1]), "MPI_Comm_idup");
  });
  int is_complete = 0;
  const auto begin = std::chrono::steady_clock::now();
  while (!is_complete) {
    thread_->run([&] { check(MPI_Testall(2, requests, &is_complete, MPI_STATUSES_IGNORE), "MPI_Comm_idup"); });
    if (is_complete) break;
    if (std::chrono::steady_clock::now() - begin > kOpenLimit)
      throw zr::PluginError(ZR_COMM,
                            "communicator \"mpi\": the ranks cannot reach each other through MPI; see mpirun's "
                            "messages");
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  thread_->run([&] {
    for (const MPI_Comm comm : {channel_.collectives, channel_.messages})
      check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  });
}

// MPI's communicators stay until MPI ends: freeing them would be collective.
MpiCommunicator::~MpiCommunicator() {
  if (!thread_) return;
  thread_->remove(*this);
  resolve_completed();
  if (!queue_.empty()) MpiThread::give_up();
  for (const Pending& pending : queue_)
    if (pending.done) pending.done.resolve(ZR_CANCELLED, 0, (pending.what + ": the communicator was closed").c_str());
  host_.need<zr_memory_service>().account(host_.abi(), kTag, -static_cast<int64_t>(pieces_.size()));
}

void MpiCommunicator::abort() noexcept {
  aborted_ = true;
  if (thread_) thread_->wake();  // which fails the operations, once it does not use their memory any more
}

void MpiCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  if (stream) throw zr::PluginError(ZR_UNSUPPORTED, "comm_mpi does not accept streams");
  const bool is_message = coll.op == ZR_SEND || coll.op == ZR_RECV;
  if (is_message && thread_ && (coll.tag < 0 || coll.tag > tag_limit_))
    throw zr::PluginError(ZR_UNSUPPORTED, "comm_mpi has tags from 0 to " + std::to_string(tag_limit_) +
                                              ", but this one is " + std::to_string(coll.tag));
  auto transfer = std::make_unique<Transfer>(coll, channel_.rank, channel_.world, collectives_);
  if (!thread_) {
    if (aborted_) throw zr::PluginError(ZR_CANCELLED, "the communicator was aborted");
    transfer->copy_own_part(channel_);
    if (done) zr::Done::retained(host_, done).resolve();
    return;
  }
  progress();
  if (!is_message) ++collectives_;
  queue_.push_back({zr::Done::retained(host_, done), transfer->parts().what()});
  const uint64_t number = resolved_ + queue_.size();
  {
    const std::lock_guard lock(mutex_);
    submitted_.push_back(std::move(transfer));
  }
  thread_->wake();
  if (done) return;
  {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return completed_ >= number || failed_; });
  }
  resolve_completed();
  if (resolved_ < number) throw_failure();
}

void MpiCommunicator::progress() {
  if (!thread_) return;
  resolve_completed();
  {
    const std::lock_guard lock(mutex_);
    if (!failed_) return;
  }
  throw_failure();
}

// In order of submission.
void MpiCommunicator::resolve_completed() {
  uint64_t completed = 0;
  {
    const std::lock_guard lock(mutex_);
    completed = completed_;
  }
  for (; resolved_ < completed; ++resolved_) {
    const Pending pending = std::move(queue_.front());
    queue_.pop_front();
    if (pending.done) pending.done.resolve();
  }
}

// Resolves what is pending with the failure. The caller of submit() gets it from submit() itself.
void MpiCommunicator::throw_failure() {
  Failed failed;
  {
    const std::lock_guard lock(mutex_);
    failed = *failed_;
  }
  for (const Pending& pending : std::exchange(queue_, {}))
    if (pending.done) pending.done.resolve(failed.code, 0, failed.text.c_str());
  throw zr::PluginError(failed.code, failed.text);
}

MpiThread::Client::State MpiCommunicator::advance() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failed_) return {false, false};
    for (auto& transfer : submitted_) transfers_.push_back(std::move(transfer));
    submitted_.clear();
  }
  bool has_moved = false;
  try {
    if (aborted_) throw zr::PluginError(ZR_CANCELLED, "the communicator was aborted");
    if (MpiThread::has_given_up())
      throw zr::PluginError(ZR_COMM, "another communicator \"mpi\" of this process has failed");
    has_moved = advance_transfers();
  } catch (const zr::PluginError& error) {
    fail(error.code(), error.what());
    return {false, true};
  } catch (const std::exception& error) {
    fail(ZR_NOMEM, error.what());
    return {false, true};
  }
  return {!transfers_.empty(), has_moved};
}

bool MpiCommunicator::advance_transfers() {
  bool has_moved = false;
  for (std::size_t i = 0; i < transfers_.size(); ++i) {
    Transfer& transfer = *transfers_[i];
    if (transfer.is_complete()) continue;
    if (!transfer.has_started()) {
      if (!may_start(i)) continue;
      transfer.start(channel_);
      has_moved = true;
    }
    has_moved |= transfer.advance(channel_);
  }
  const auto end = std::find_if(transfers_.begin(), transfers_.end(), [](const auto& t) { return !t->is_complete(); });
  if (end == transfers_.begin()) return has_moved;
  {
    const std::lock_guard lock(mutex_);
    completed_ += static_cast<uint64_t>(end - transfers_.begin());
  }
  changed_.notify_all();
  transfers_.erase(transfers_.begin(), end);
  return has_moved;
}

// Collectives start in order, and so do messages to, or from, the same peer. Nothing starts that writes memory which an
// earlier operation still uses, or uses memory which one still writes.
bool MpiCommunicator::may_start(std::size_t index) const {
  const zr::CollectiveParts& parts = transfers_[index]->parts();
  if (transfers_[index]->waits_for(channel_)) return false;
  for (std::size_t i = 0; i < index; ++i) {
    const Transfer& earlier = *transfers_[i];
    if (earlier.is_complete()) continue;
    if (earlier.parts().conflicts(parts)) return false;
    if (earlier.has_started() || earlier.parts().is_message() != parts.is_message()) continue;
    if (!parts.is_message() ||
        (earlier.parts().coll.op == parts.coll.op && earlier.parts().coll.peer == parts.coll.peer))
      return false;
  }
  return true;
}

// MPI is not called again, so that nothing uses the memory of operations after the wake-up.
void MpiCommunicator::fail(zr_code code, const std::string& text) {
  MpiThread::give_up();
  {
    const std::lock_guard lock(mutex_);
    failed_ = Failed{code, text};
  }
  changed_.notify_all();
}

}  // namespace mpi
