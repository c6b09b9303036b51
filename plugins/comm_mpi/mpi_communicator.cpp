#include "mpi_communicator.hpp"

#include <algorithm>
#include <utility>

namespace mpi {

MpiCommunicator::MpiCommunicator(const zr::Host& host, const zr_comm_open& options)
    : host_(host),
      pieces_(static_cast<std::size_t>(Transfer::buffer_bytes(options.world))),
      channel_{MPI_COMM_NULL,  MPI_COMM_NULL, options.rank,           options.world,
               pieces_.data(), false,         ZR_CHOOSE(reduce_ranks)} {
  if (options.world == 1) return;
  thread_ = &MpiThread::get();
  thread_->run([&] {
    int rank = 0, world = 0;
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &world), "MPI_Comm_size");
    if (rank != options.rank || world != options.world)
      throw zr::PluginError(ZR_INVALID, "this process is rank " + std::to_string(options.rank) + " of " +
                                            std::to_string(options.world) + " of the job, but rank " +
                                            std::to_string(rank) + " of " + std::to_string(world) +
                                            " of MPI; start the job with one mpirun, without other variables of ranks");
    check(MPI_Comm_dup(MPI_COMM_WORLD, &channel_.collectives), "MPI_Comm_dup");
    check(MPI_Comm_dup(MPI_COMM_WORLD, &channel_.messages), "MPI_Comm_dup");
    for (const MPI_Comm comm : {channel_.collectives, channel_.messages})
      check(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  });
  thread_->add(*this);
}

// MPI's communicators stay until MPI ends: freeing them would be collective.
MpiCommunicator::~MpiCommunicator() {
  if (!thread_) return;
  thread_->remove(*this);
  thread_->run([&] {
    for (const auto& transfer : transfers_) transfer->cancel();
  });
  if (aborted_ || !transfers_.empty()) thread_->give_up();
  for (auto* list : {&transfers_, &submitted_})
    for (const auto& transfer : *list)
      if (transfer->done)
        transfer->done.resolve(ZR_CANCELLED, 0, (transfer->parts().what() + ": the communicator was closed").c_str());
}

void MpiCommunicator::abort() noexcept {
  aborted_ = true;
  if (thread_) thread_->give_up();
  { const std::lock_guard lock(mutex_); }
  changed_.notify_all();
}

void MpiCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  if (stream) throw zr::PluginError(ZR_UNSUPPORTED, "comm_mpi does not accept streams");
  if (aborted_) throw zr::PluginError(ZR_CANCELLED, "the communicator was aborted");
  const bool is_message = coll.op == ZR_SEND || coll.op == ZR_RECV;
  if (is_message && (coll.tag < 0 || coll.tag == INT32_MAX))
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "comm_mpi needs tags of at least 0, but this one is " + std::to_string(coll.tag));
  auto transfer = std::make_unique<Transfer>(coll, channel_.rank, channel_.world, collectives_);
  if (!is_message) ++collectives_;
  if (!thread_) {
    transfer->copy_own_part(channel_);
    if (done) zr::Done::retained(host_, done).resolve();
    return;
  }
  transfer->done = zr::Done::retained(host_, done);
  std::unique_lock lock(mutex_);
  if (failed_) throw zr::PluginError(failed_->code, failed_->text);
  if (!done) awaited_ = transfer.get();
  submitted_.push_back(std::move(transfer));
  lock.unlock();
  thread_->wake();
  if (done) return;
  lock.lock();
  changed_.wait(lock, [&] { return !awaited_ || failed_ || aborted_; });
  if (!awaited_) return;
  awaited_ = nullptr;
  if (failed_) throw zr::PluginError(failed_->code, failed_->text);
  throw zr::PluginError(ZR_CANCELLED, "the communicator was aborted");
}

MpiThread::Client::State MpiCommunicator::advance() noexcept {
  bool has_moved = false;
  {
    const std::lock_guard lock(mutex_);
    for (auto& transfer : submitted_) transfers_.push_back(std::move(transfer));
    submitted_.clear();
  }
  if (aborted_) return {false, false};
  try {
    has_moved = advance_transfers();
  } catch (const zr::PluginError& error) {
    fail(error.code(), error.what());
  } catch (const std::exception& error) {
    fail(ZR_NOMEM, error.what());
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
  resolve_completed();
  return has_moved;
}

// Collectives start in order; messages may overtake them. Neither uses memory that an earlier operation still writes,
// or writes memory that one still reads.
bool MpiCommunicator::may_start(std::size_t index) const {
  const Transfer& transfer = *transfers_[index];
  if (transfer.waits_for(channel_)) return false;
  return std::none_of(transfers_.begin(), transfers_.begin() + static_cast<std::ptrdiff_t>(index),
                      [&](const auto& earlier) {
                        const bool same_kind = earlier->parts().is_message() == transfer.parts().is_message();
                        return !earlier->is_complete() &&
                               ((same_kind && !earlier->has_started()) || earlier->parts().conflicts(transfer.parts()));
                      });
}

// Completions are resolved in order of submission.
void MpiCommunicator::resolve_completed() {
  const auto end = std::find_if(transfers_.begin(), transfers_.end(), [](const auto& t) { return !t->is_complete(); });
  for (auto transfer = transfers_.begin(); transfer != end; ++transfer) {
    if ((*transfer)->done) {
      (*transfer)->done.resolve();
      continue;
    }
    const std::lock_guard lock(mutex_);
    if (awaited_ == transfer->get()) awaited_ = nullptr;
    changed_.notify_all();
  }
  transfers_.erase(transfers_.begin(), end);
}

void MpiCommunicator::fail(zr_code code, const std::string& text) {
  thread_->give_up();
  {
    const std::lock_guard lock(mutex_);
    failed_ = Failed{code, text};
  }
  changed_.notify_all();
  for (const auto& transfer : transfers_) {
    transfer->cancel();
    if (transfer->done) transfer->done.resolve(transfer->is_complete() ? zr_code{ZR_OK} : code, 0, text.c_str());
  }
  transfers_.clear();
}

}  // namespace mpi
