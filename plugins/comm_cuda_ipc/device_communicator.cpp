#include "device_communicator.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "zr/collective.hpp"
#include "zr/round_up.hpp"

namespace peer {

namespace {
int checked_world(int world) {
  if (world > kMaxRanks)
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'shm' connects at most " + std::to_string(kMaxRanks) +
                                              " ranks through memory of a device, not " + std::to_string(world) +
                                              "; set offload.gradients = \"cpu\" to exchange in host memory");
  return world;
}
}  // namespace

DeviceCommunicator::DeviceCommunicator(const zr::Host& host, const zr_comm_open& options, int64_t staging_bytes)
    : host_(host),
      rank_(options.rank),
      world_(checked_world(options.world)),
      control_(host, options, staging_bytes),
      device_(open_device(options.device.id, options.rank, options.world)),
      memory_(*device_, options.world),
      device_id_(options.device),
      store_prefix_(options.store_prefix),
      announcement_bytes_(
          zr::round_up(sizeof(Announcement) + 2 * sizeof(int64_t) * static_cast<size_t>(options.world), 64)),
      own_announcement_(control_.mem_alloc(announcement_bytes_, 64, 0)),
      received_(announcement_bytes_ * static_cast<size_t>(options.world)) {
  exchange_handles();
}

DeviceCommunicator::~DeviceCommunicator() { close_orderly(); }

void DeviceCommunicator::put(const char* what, const void* value, uint64_t bytes) {
  const std::string key = store_prefix_ + "device." + what + "." + std::to_string(rank_);
  zr_error error = zr::no_error();
  zr::check(host_.need<zr_store_service>().put(host_.abi(), key.c_str(), value, bytes, &error), error);
}

void DeviceCommunicator::get(const char* what, int rank, int64_t timeout_ns, void* value, uint64_t bytes) {
  const std::string key = store_prefix_ + "device." + what + "." + std::to_string(rank);
  zr_error error = zr::no_error();
  zr::check(host_.need<zr_store_service>().get(host_.abi(), key.c_str(), timeout_ns, value, &bytes, &error), error);
}

// Through the store, whose calls end if the job fails. Opens staging memory of every peer, so that a job whose ranks
// cannot open each other's memory ends before its first step.
void DeviceCommunicator::exchange_handles() {
  if (world_ == 1) return;
  constexpr int64_t kFirstStaging = int64_t{1} << 20;
  struct Handles {
    Handle ready, finished;
    Location staging;
  };
  grow_staging(kFirstStaging);
  const Handles own{device_->event(Event::ready), device_->event(Event::finished),
                    memory_.location_of(staging_, staging_bytes_)};
  put("handles", &own, sizeof own);
  for (int r = 0; r < world_; ++r) {
    if (r == rank_) continue;
    Handles handles;
    get("handles", r, -1, &handles, sizeof handles);
    try {
      device_->open_event(r, Event::ready, handles.ready);
      device_->open_event(r, Event::finished, handles.finished);
      memory_.at(r, handles.staging);
    } catch (const zr::PluginError& error) {
      if (error.code() == ZR_NOMEM) throw;
      throw zr::PluginError(ZR_COMM,
                            "the memory of rank " + std::to_string(r) + "'s device cannot be opened: " + error.what() +
                                "; start all ranks in one container with the same visible devices, or set "
                                "offload.gradients = \"cpu\" to exchange in host memory",
                            error.native());
    }
  }
}

void DeviceCommunicator::wait_for_mark(std::chrono::nanoseconds limit) noexcept {
  const auto begin = std::chrono::steady_clock::now();
  while (!device_->mark_is_reached() && std::chrono::steady_clock::now() - begin < limit)
    std::this_thread::sleep_for(std::chrono::microseconds(100));
}

// Peers that still read this rank's memory are waited for by its stream. A peer that has failed never closes its
// mappings; then this rank frees its memory after a short time. If the stream waits for such a peer, which nothing can
// end, its memory stays allocated: a device may wait for its streams to free memory.
void DeviceCommunicator::close_orderly() noexcept {
  constexpr auto kLimit = std::chrono::seconds(2);
  constexpr int64_t kLimitNs = std::chrono::nanoseconds(kLimit).count();
  try {
    if (has_stream_) device_->set_mark(last_stream_);  // other communicators may have put waits on it since
  } catch (const std::exception&) {                    // the device has failed
  }
  wait_for_mark(kLimit);
  if (!device_->mark_is_reached()) {
    device_->abort();
    wait_for_mark(kLimit);
  }
  if (!device_->mark_is_reached()) return memory_.abandon();
  memory_.close_peers();
  device_->close_events();
  try {
    put("closed", "", 0);
    char nothing = 0;
    for (int r = 0; r < world_ && !failure_; ++r)
      if (r != rank_) get("closed", r, kLimitNs, &nothing, 1);
  } catch (const std::exception&) {  // the job has failed, or a peer is late
  }
}

zr_view DeviceCommunicator::mem_alloc(uint64_t bytes, uint64_t align, uint32_t flags) {
  if (flags != 0)
    throw zr::PluginError(ZR_UNSUPPORTED,
                          "communicator 'shm' does not support memory with flags " + std::to_string(flags));
  if (align > 256)
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'shm' cannot align memory of a device to " +
                                              std::to_string(align) + " bytes; the limit is 256");
  return {memory_.allocate(bytes), static_cast<int64_t>(bytes), ZR_U8, 0, device_id_};
}

void DeviceCommunicator::abort() noexcept {
  control_.abort();
  device_->abort();
}

void DeviceCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  operation_.assign(coll, rank_, world_);
  if (!stream)
    throw zr::PluginError(ZR_INVALID, operation_.what() + ": memory of a device needs the stream of the call");
  if (operation_.is_message())
    throw zr::PluginError(ZR_UNSUPPORTED,
                          operation_.what() + ": communicator 'shm' has no messages between devices; use a collective");
  if (failure_) throw zr::PluginError(failure_->code, failure_->text);
  void* const native = zr::native_stream(host_, stream);
  if (has_stream_ && native != last_stream_)
    throw zr::PluginError(ZR_UNSUPPORTED, operation_.what() + ": communicator 'shm' has one stream per device");
  last_stream_ = native;
  has_stream_ = true;
  try {
    enqueue(native);
    if (done) resolve_in_stream(done, native);
  } catch (const std::exception& error) {  // this rank has not done its part, so its peers must not continue
    const auto* const known = dynamic_cast<const zr::PluginError*>(&error);
    failure_ = Failure{known ? known->code() : zr_code{ZR_INTERNAL}, error.what()};
    control_.abort();
    try {
      device_->set_mark(native);  // of what is on the stream already
    } catch (const zr::PluginError&) {
    }
    throw;
  }
}

void DeviceCommunicator::resolve_in_stream(zr_done* done, void* native_stream) {
  auto kept = std::make_unique<zr::Done>(zr::Done::retained(host_, done));
  device_->call(
      [](void* context) {
        const std::unique_ptr<zr::Done> completion(static_cast<zr::Done*>(context));
        completion->resolve();
      },
      kept.get(), native_stream);
  static_cast<void>(kept.release());  // the call deletes it
}

void DeviceCommunicator::enqueue(void* native_stream) {
  ++number_;
  staged_src_ = nullptr;
  announce(native_stream);
  compare();
  const shm::Route route = this->route();
  if (route == shm::Route::stage) stage(native_stream);
  wait_for_peers(Event::ready, native_stream);
  route == shm::Route::push ? push(native_stream) : pull(native_stream);
  device_->record(Event::finished, native_stream);
  const std::string label = "the end of " + operation_.what();
  zr_coll end = zr::barrier(label.c_str());
  end.fingerprint = fingerprint_of(Meeting::end);
  control_.submit(end, nullptr, nullptr);
  wait_for_peers(Event::finished, native_stream);
  device_->set_mark(native_stream);
}

void DeviceCommunicator::announce(void* native_stream) {
  const zr::CollectiveParts& op = operation_;
  Announcement own;
  own.fingerprint = op.coll.fingerprint;
  own.op = op.coll.op;
  own.in_place = op.in_place;
  own.dtype = op.dtype();
  own.dst_dtype = op.receives(rank_) ? op.coll.dst.dtype : zr_dtype{ZR_NONE};
  own.elements = op.elements();
  if (op.sends(rank_)) own.src = memory_.location_of(op.coll.src.data, op.src_bytes());
  if (op.receives(rank_)) own.dst = memory_.location_of(op.coll.dst.data, op.dst_bytes());
  own.src_is_shared = own.src.allocation || !op.sends(rank_) || op.coll.src.count == 0;
  own.dst_is_shared = own.dst.allocation || !op.receives(rank_) || op.coll.dst.count == 0;
  op.label.copy(own.label, sizeof own.label - 1);
  std::memcpy(own_announcement_.data, &own, sizeof own);
  auto* const counts = reinterpret_cast<int64_t*>(static_cast<char*>(own_announcement_.data) + sizeof own);
  if (op.coll.op == ZR_ALL_TO_ALL) {
    std::copy(op.counts.begin(), op.counts.end(), counts);
    std::copy(op.recv_counts.begin(), op.recv_counts.end(), counts + world_);
  }
  device_->record(Event::ready, native_stream);
  exchange_announcements(Meeting::announce);
}

void DeviceCommunicator::exchange_announcements(Meeting meeting) {
  const auto bytes = static_cast<int64_t>(announcement_bytes_);
  const std::string label = "the arguments of " + operation_.what();
  zr_coll exchange = zr::all_gather({own_announcement_.data, bytes, ZR_U8, 0, {ZR_DEVICE_CPU, 0}},
                                    {received_.data(), bytes * world_, ZR_U8, 0, {ZR_DEVICE_CPU, 0}}, label.c_str());
  exchange.fingerprint = fingerprint_of(meeting);
  control_.submit(exchange, nullptr, nullptr);
}

void DeviceCommunicator::compare() {
  const auto call_of = [&](int r) {
    const Announcement& a = announcement(r);
    return "rank " + std::to_string(r) + " issued " + std::string(zr::name_of_op(a.op)) + " '" + a.label + "'" +
           zr::shape_text(a.dtype, a.elements);
  };
  const auto differ = [&](int p, int r, const std::string& detail) {
    throw zr::PluginError(ZR_MISMATCH,
                          "the ranks disagree about a collective: " + call_of(p) + ", " + call_of(r) + detail);
  };
  for (int r = 1; r < world_; ++r)
    if (announcement(r).fingerprint != announcement(0).fingerprint || announcement(r).op != announcement(0).op)
      differ(0, r, "");
  if (operation_.coll.op != ZR_ALL_TO_ALL) return;
  for (int p = 0; p < world_; ++p)
    for (int r = 0; r < world_; ++r)
      if (const int64_t sent = counts_to(p)[r], expected = counts_from(r)[p]; sent != expected)
        differ(p, r,
               "; rank " + std::to_string(p) + " sends " + std::to_string(sent) + " elements to rank " +
                   std::to_string(r) + ", which expects " + std::to_string(expected));
}

// The same on every rank.
shm::Route DeviceCommunicator::route() {
  shm::MemoryTraits memory{true, true, false};
  for (int r = 0; r < world_; ++r) {
    memory.src_shared &= announcement(r).src_is_shared != 0;
    memory.dst_shared &= announcement(r).dst_is_shared != 0;
    memory.in_place |= announcement(r).in_place != 0;
  }
  return shm::route_of(operation_, memory);
}

// Twice as much as is needed, so that it seldom grows; on a device that is almost full, only what is needed. The memory
// before stays allocated, because peers may have it open.
void DeviceCommunicator::grow_staging(int64_t bytes) {
  if (staging_) memory_.release(staging_);
  staging_ = nullptr;
  staging_bytes_ = 0;
  const auto allocate = [&](int64_t size) {
    staging_ = memory_.allocate(static_cast<uint64_t>(size));
    staging_bytes_ = size;
  };
  try {
    return allocate(2 * bytes);
  } catch (const zr::PluginError& error) {
    if (error.code() != ZR_NOMEM) throw;
  }
  try {
    allocate(bytes);
  } catch (const zr::PluginError& error) {
    if (error.code() != ZR_NOMEM) throw;
    throw zr::PluginError(ZR_NOMEM,
                          "cannot allocate " + std::to_string(bytes) +
                              " bytes on the device, in which peers read data of collectives: " + error.what() +
                              "; libtorch keeps memory that it has freed, so set memory.device_budget lower, train "
                              "smaller micro-batches, or set offload.gradients = \"cpu\" to exchange in host memory",
                          error.native());
  }
}

// Copies this rank's src to memory that peers can open and that no rank overwrites, and announces it again.
void DeviceCommunicator::stage(void* native_stream) {
  if (operation_.sends(rank_) && operation_.coll.src.count > 0) {
    const int64_t bytes = operation_.src_bytes();
    if (bytes > staging_bytes_) grow_staging(bytes);
    device_->copy(staging_, operation_.coll.src.data, bytes, native_stream);
    staged_src_ = static_cast<const char*>(staging_);
    reinterpret_cast<Announcement*>(own_announcement_.data)->src = memory_.location_of(staging_, bytes);
  }
  device_->record(Event::ready, native_stream);
  exchange_announcements(Meeting::announce_again);
}

void DeviceCommunicator::wait_for_peers(Event event, void* native_stream) {
  for (int r = 0; r < world_; ++r)
    if (r != rank_) device_->wait(r, event, native_stream);
}

shm::Extent DeviceCommunicator::extent(int from, int to) {
  if (operation_.coll.op != ZR_ALL_TO_ALL) return operation_.extent(from, to, nullptr, nullptr);
  return operation_.extent(from, to, counts_to(from), counts_from(to));
}

const char* DeviceCommunicator::source(int rank) {
  if (rank != rank_) return memory_.at(rank, announcement(rank).src);
  return staged_src_ ? staged_src_ : static_cast<const char*>(operation_.coll.src.data);
}

char* DeviceCommunicator::destination(int rank) {
  return rank == rank_ ? static_cast<char*>(operation_.coll.dst.data) : memory_.at(rank, announcement(rank).dst);
}

// This rank writes its own dst.
void DeviceCommunicator::pull(void* native_stream) {
  const zr::CollectiveParts& op = operation_;
  if (!op.receives(rank_)) return;
  const int64_t size = op.width();
  if (op.is_reduction()) {
    const shm::Extent own = extent(rank_, rank_);
    if (own.count == 0) return;
    sources_.clear();
    for (int p = 0; p < world_; ++p) sources_.push_back(source(p) + own.from * size);
    void* const dst = op.coll.dst.data;
    const zr::ReduceKind kind{op.coll.reduce, (op.coll.flags & ZR_COLL_ACCUMULATE) != 0, op.coll.src.dtype,
                              op.coll.dst.dtype};
    return device_->reduce(kind, sources_.data(), world_, &dst, 1, 0, own.count, native_stream);
  }
  for (int i = 0; i < world_; ++i) {
    const int p = (rank_ + i) % world_;  // start at different ranks, so that not all read from the same rank
    const shm::Extent part = op.sends(p) ? extent(p, rank_) : shm::Extent{};
    if (part.count == 0) continue;
    char* const to = static_cast<char*>(op.coll.dst.data) + part.to * size;
    const char* const from = source(p) + part.from * size;
    if (to != from) device_->copy(to, from, part.count * size, native_stream);
  }
}

// This rank reduces its share of the elements for all receivers.
void DeviceCommunicator::push(void* native_stream) {
  const zr::CollectiveParts& op = operation_;
  const shm::Extent own = shm::share(op.coll.src.count, rank_, world_);
  if (own.count == 0) return;
  sources_.clear();
  destinations_.clear();
  for (int r = 0; r < world_; ++r) {
    sources_.push_back(source(r));
    if (op.receives(r)) destinations_.push_back(destination(r));
  }
  const int writer = op.coll.op == ZR_REDUCE ? op.coll.root : rank_;
  const zr::ReduceKind kind{op.coll.reduce, (op.coll.flags & ZR_COLL_ACCUMULATE) != 0, op.coll.src.dtype,
                            announcement(writer).dst_dtype};
  device_->reduce(kind, sources_.data(), world_, destinations_.data(), static_cast<int>(destinations_.size()), own.from,
                  own.count, native_stream);
}

}  // namespace peer
