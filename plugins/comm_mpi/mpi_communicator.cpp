#include "mpi_communicator.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <utility>

#include "flat_transfer.hpp"
#include "host_gather.hpp"
#include "ordered_reduction.hpp"
#include "per_host_reduction.hpp"
#include "zr/round_up.hpp"

namespace mpi {

namespace {
constexpr const char* kTag = "pieces of reductions";
constexpr auto kOpenLimit = std::chrono::seconds(60);  // once all ranks have called open()
}  // namespace

MpiCommunicator::MpiCommunicator(const zr::Host& host, const zr_comm_open& open, MpiThread* thread,
                                 const MpiOptions& options)
    : host_(host),
      thread_(thread),
      options_(options),
      pieces_(static_cast<std::size_t>(FlatTransfer::buffer_bytes(open.world))),
      channel_{MPI_COMM_NULL, MPI_COMM_NULL, open.rank, open.world, 0, pieces_.data(), false, ZR_CHOOSE(reduce_ranks)} {
  if (!thread_) return;
  channel_.hosts = Hosts(meet(open));
  open_channel(open);
  open_local(open);
  thread_->add(*this);
  host_.need<zr_memory_service>().account(host_.abi(), kTag, static_cast<int64_t>(pieces_.size()) + sums_.count);
}

int64_t MpiCommunicator::most_bytes(int world, const MpiOptions& options) {
  int64_t bytes = FlatTransfer::buffer_bytes(world);
  if (options.hierarchy && world == 2) bytes += HostReduction::buffer_bytes();
  if (options.hierarchy && world > 2)
    bytes += HostReduction::buffer_bytes() + static_cast<int64_t>(shm::Layout(world - 1, options.staging_bytes).bytes);
  return bytes;
}

// Waits for all ranks where the control plane notices if one is lost: MPI would wait for ever. Returns their hosts.
std::vector<std::string> MpiCommunicator::meet(const zr_comm_open& open) {
  const auto& store = host_.need<zr_store_service>();
  const auto key = [&](int rank) { return std::string(open.store_prefix) + "mpi.host." + std::to_string(rank); };
  const std::string own = host_identity();
  zr_error error = zr::no_error();
  zr::check(store.put(host_.abi(), key(open.rank).c_str(), own.data(), own.size(), &error), error);
  std::vector<std::string> identities;
  for (int rank = 0; rank < open.world; ++rank) {
    char value[1024];
    uint64_t bytes = sizeof value;
    zr::check(store.get(host_.abi(), key(rank).c_str(), -1, value, &bytes, &error), error);
    identities.emplace_back(value, bytes);
  }
  return identities;
}

// The communicator of the ranks of this host.
void MpiCommunicator::open_local(const zr_comm_open& open) {
  const Hosts& hosts = channel_.hosts;
  if (!has_local_steps(hosts, options_)) {
    if (open.rank == 0 && options_.hierarchy && !hosts.gap().empty())
      host_.log(ZR_LOG_WARN,
                "communicator \"mpi\": " + hosts.gap() +
                    ": collectives do not use the shared memory of hosts, and more bytes pass between "
                    "them; number the ranks host by host (mpirun --map-by slot, srun --distribution=block)");
    return;
  }
  if (!hosts.has_levels()) {
    channel_.local = &steps_.emplace(host_, nullptr, local_mutex_);
    return;
  }
  const int host = hosts.of(open.rank), first = hosts.first(host);
  const std::string prefix = std::string(open.store_prefix) + "host." + std::to_string(host) + ".";
  zr_comm_open inside = open;
  inside.rank = open.rank - first;
  inside.world = hosts.size(host);
  inside.store_prefix = prefix.c_str();
  try {
    local_ =
        std::make_unique<shm::ShmCommunicator>(host_, inside, options_.staging_bytes, shm::RanksOfJob{first, false});
  } catch (const zr::PluginError& error) {
    throw zr::PluginError(error.code(),
                          std::string("communicator \"mpi\", shared memory of the ranks of this host: ") +
                              error.what() + "; or set communicator.mpi.hierarchy = false",
                          error.native());
  }
  channel_.local = &steps_.emplace(host_, local_.get(), local_mutex_);
  sums_ = local_->mem_alloc(static_cast<uint64_t>(HostReduction::buffer_bytes()), 64, 0);
  channel_.sums = static_cast<char*>(sums_.data);
}

// The same kind on all ranks.
std::unique_ptr<Transfer> MpiCommunicator::transfer(const zr_coll& coll) {
  zr::CollectiveParts parts;
  parts.assign(coll, channel_.rank, channel_.world);
  switch (way_of(parts, channel_.hosts, options_)) {
    case Way::gather: return std::make_unique<HostGather>(std::move(parts), collectives_);
    case Way::ordered: need_sums(); return std::make_unique<OrderedReduction>(std::move(parts), collectives_);
    case Way::per_host: need_sums(); return std::make_unique<PerHostReduction>(std::move(parts), collectives_);
    case Way::flat: break;
  }
  return std::make_unique<FlatTransfer>(std::move(parts), collectives_);
}

// Only quantized sums need them if there is one rank on each host.
void MpiCommunicator::need_sums() {
  if (channel_.sums) return;
  sums_alone_.resize(static_cast<std::size_t>(HostReduction::buffer_bytes()));
  channel_.sums = sums_alone_.data();
  host_.need<zr_memory_service>().account(host_.abi(), kTag, static_cast<int64_t>(sums_alone_.size()));
}

void MpiCommunicator::open_channel(const zr_comm_open& open) {
  MPI_Request requests[2];
  thread_->run([&] {
    int rank = 0, world = 0, found = 0;
    int* limit = nullptr;
    check(MPI_Comm_rank(MPI_COMM_WORLD, &rank), "MPI_Comm_rank");
    check(MPI_Comm_size(MPI_COMM_WORLD, &world), "MPI_Comm_size");
    if (rank != open.rank || world != open.world)
      throw zr::PluginError(ZR_INVALID, "this process is rank " + std::to_string(open.rank) + " of " +
                                            std::to_string(open.world) + " of the job, but rank " +
                                            std::to_string(rank) + " of " + std::to_string(world) +
                                            " of MPI; start the job with one mpirun, without other variables of ranks");
    check(MPI_Comm_get_attr(MPI_COMM_WORLD, MPI_TAG_UB, static_cast<void*>(&limit), &found), "MPI_TAG_UB");
    tag_limit_ = found ? *limit : 32767;
    channel_.tags = static_cast<uint64_t>(tag_limit_);
    check(MPI_Comm_idup(MPI_COMM_WORLD, &channel_.collectives, &requests[0]), "MPI_Comm_idup");
    check(MPI_Comm_idup(MPI_COMM_WORLD, &channel_.messages, &requests[1]), "MPI_Comm_idup");
  });
  int is_complete = 0;
  const auto begin = std::chrono::steady_clock::now();
  while (!is_complete) {
    thread_->run([&] { check(MPI_Testall(2, requests, &is_complete, MPI_STATUSES_IGNORE), "MPI_Comm_idup"); });
    if (is_complete) break;
    if (std::chrono::steady_clock::now() - begin > kOpenLimit)
      throw zr::PluginError(
          ZR_COMM, "communicator \"mpi\": the ranks cannot reach each other through MPI; see mpirun's messages");
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
  {
    const std::lock_guard lock(mutex_);
    end_all(ZR_CANCELLED);
  }
  resolve_completed();
  if (!queue_.empty()) MpiThread::give_up();
  for (const Pending& pending : queue_)
    if (pending.done) pending.done.resolve(ZR_CANCELLED, 0, (pending.what + ": the communicator was closed").c_str());
  host_.need<zr_memory_service>().account(host_.abi(), kTag,
                                          -static_cast<int64_t>(pieces_.size() + sums_alone_.size()) - sums_.count);
}

zr_view MpiCommunicator::mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
  if (local_) {
    const std::lock_guard lock(local_mutex_);
    return local_->mem_alloc(bytes, align, flags);
  }
  if (flags != 0)
    throw zr::PluginError(ZR_UNSUPPORTED, "comm_mpi does not support memory with flags " + std::to_string(flags));
  constexpr uint64_t kHugePage = uint64_t{2} << 20;
  align = std::max<uint64_t>(align, bytes >= kHugePage ? kHugePage : 64);
  const uint64_t size = zr::round_up(std::max<uint64_t>(bytes, 1), align);
  std::unique_ptr<void, void (*)(void*)> memory(std::aligned_alloc(align, size), std::free);
  if (!memory) throw std::bad_alloc();
  if (align == kHugePage) ::madvise(memory.get(), size, MADV_HUGEPAGE);
  std::memset(memory.get(), 0, size);
  const zr_view view{memory.get(), static_cast<int64_t>(bytes), ZR_U8, 0, {ZR_DEVICE_CPU, 0}};
  memory_.emplace(view.data, std::move(memory));
  return view;
}

void MpiCommunicator::mem_free(const zr_view& memory) noexcept {
  if (!local_) return void(memory_.erase(memory.data));
  const std::lock_guard lock(local_mutex_);
  local_->mem_free(memory);
}

// The other ranks may need this process's messages before they call it, so it does not wait with the lock.
void MpiCommunicator::shared_alloc(uint64_t bytes, void** writer, const void** reader) {
  if (!local_) throw zr::PluginError(ZR_UNSUPPORTED, "the ranks of this job do not share the memory of their hosts");
  shm::ShmCommunicator::SharedBlock block;
  zr::Done done(host_);
  {
    const std::lock_guard lock(local_mutex_);
    local_->begin_shared(bytes, &block, done.abi());
  }
  while (!done.ready()) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    const std::lock_guard lock(local_mutex_);
    local_->progress();
  }
  const std::lock_guard lock(local_mutex_);
  local_->map_shared(block, writer, reader);
}

void MpiCommunicator::shared_free(void* writer) noexcept {
  const std::lock_guard lock(local_mutex_);
  local_->shared_free(writer);
}

void MpiCommunicator::abort() noexcept {
  aborted_ = true;
  if (local_) local_->abort();
  if (thread_) thread_->wake();  // which fails the operations, once it does not use their memory any more
}

void MpiCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  if (stream) throw zr::PluginError(ZR_UNSUPPORTED, "comm_mpi does not accept streams");
  const bool is_message = coll.op == ZR_SEND || coll.op == ZR_RECV;
  if (is_message && thread_ && (coll.tag < 0 || coll.tag > tag_limit_))
    throw zr::PluginError(ZR_UNSUPPORTED, "comm_mpi has tags from 0 to " + std::to_string(tag_limit_) +
                                              ", but this one is " + std::to_string(coll.tag));
  if (!thread_) {
    if (aborted_) throw zr::PluginError(ZR_CANCELLED, "the communicator was aborted");
    zr::CollectiveParts parts;
    parts.assign(coll, channel_.rank, channel_.world);
    FlatTransfer(std::move(parts), collectives_).copy_own_part(channel_);
    if (done) zr::Done::retained(host_, done).resolve();
    return;
  }
  const uint64_t number = enqueue(coll, done, nullptr);
  if (done) return;
  {
    std::unique_lock lock(mutex_);
    do thread_->hurry();
    while (!changed_.wait_for(lock, std::chrono::milliseconds(1), [&] { return completed_ >= number || failed_; }));
  }
  resolve_completed();
  if (resolved_ < number) throw_failure();
}

// Returns the number of the operation, from 1.
uint64_t MpiCommunicator::enqueue(const zr_coll& coll, zr_done* done, std::shared_ptr<Gate> gate) {
  auto transfer = this->transfer(coll);
  transfer->pass(std::move(gate));
  resolve();
  if (!transfer->parts().is_message()) ++collectives_;
  queue_.push_back({zr::Done::retained(host_, done), transfer->parts().what()});
  const uint64_t number = resolved_ + queue_.size();
  {
    const std::lock_guard lock(mutex_);
    submitted_.push_back(std::move(transfer));
  }
  thread_->wake();
  return number;
}

void MpiCommunicator::progress() {
  if (!thread_) return;
  if (!queue_.empty()) thread_->hurry();
  resolve();
}

void MpiCommunicator::resolve() {
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
    if (failed_) {
      end_all(failed_->code);
      return {false, false};
    }
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
    if (transfer.is_complete()) transfer.end(ZR_OK);
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
  for (std::size_t i = 0; i < index; ++i) {
    const Transfer& earlier = *transfers_[i];
    if (earlier.is_complete()) continue;
    if (earlier.parts().conflicts(parts)) return false;
    if (earlier.has_started() || earlier.parts().is_message() != parts.is_message()) continue;
    if (!parts.is_message() ||
        (earlier.parts().coll.op == parts.coll.op && earlier.parts().coll.peer == parts.coll.peer))
      return false;
  }
  return !transfers_[index]->waits_for(channel_);
}

// Ends the operations that will not complete. Call it with mutex_.
void MpiCommunicator::end_all(zr_code code) noexcept {
  for (auto* const transfers : {&transfers_, &submitted_})
    for (const auto& transfer : *transfers)
      if (!transfer->is_complete()) transfer->end(code);
}

// MPI is not called again, so that nothing uses the memory of operations after the wake-up.
void MpiCommunicator::fail(zr_code code, const std::string& text) {
  MpiThread::give_up();
  {
    const std::lock_guard lock(mutex_);
    failed_ = Failed{code, text};
    end_all(code);
  }
  changed_.notify_all();
}

}  // namespace mpi
