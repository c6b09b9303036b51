#include "nccl_communicator.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "library.hpp"
#include "rendezvous.hpp"
#include "zr/round_up.hpp"

namespace nccl {

namespace {

constexpr const char* kTag = "NCCL: staging";
constexpr int64_t kAlign = 256;                         // of slots
constexpr auto kCloseLimit = std::chrono::seconds(60);  // for operations in progress
constexpr auto kAbortLimit = std::chrono::seconds(10);  // for streams after an abort

// The elements of an extent within [first, first + piece).
zr::Extent slice(const zr::Extent& extent, int64_t first, int64_t piece) {
  return {extent.from + first, std::clamp<int64_t>(extent.count - first, 0, piece), extent.to + first};
}

}  // namespace

NcclCommunicator::NcclCommunicator(const zr::Host& host, const zr_comm_open& options, const Settings& settings,
                                   std::shared_ptr<SharedDevice> shared)
    : host_(host),
      rank_(options.rank),
      world_(options.world),
      on_host_(options.device.type == ZR_DEVICE_CPU),
      shared_(std::move(shared)),
      device_(*shared_->device),
      end_(device_.make_mark()) {
  if (world_ > kMaxRanks)
    throw zr::PluginError(ZR_UNSUPPORTED, "communicator 'nccl' connects at most " + std::to_string(kMaxRanks) +
                                              " ranks, not " + std::to_string(world_) + "; set communicator = \"mpi\"");
  try {
    connect(options, settings);
  } catch (...) {
    close_orderly();
    throw;
  }
}

NcclCommunicator::~NcclCommunicator() { close_orderly(); }

void NcclCommunicator::connect(const zr_comm_open& options, const Settings& settings) {
  if (world_ == 1) return allocate(settings.staging_bytes);
  const Functions functions = load_library(settings.library);
  const Meeting meeting = meet(host_, options, device_, settings.staging_bytes, functions);
  allocate(meeting.staging_bytes);
  connection_ = std::make_unique<Connection>(functions, device_, meeting.id, rank_, world_, settings.connect_timeout,
                                             [&] { require_job(host_, options); });
  connection_->register_memory(staging_, (on_host_ ? 2 : 1) * world_ * slot_bytes_);
}

// Slot r is for what arrives from rank r, and slot `rank_` for this rank's own source. For host memory, slot world_ + r
// is for what is sent to rank r, and slot world_ + rank_ for the result of a reduction.
void NcclCommunicator::allocate(int64_t staging_bytes) {
  const int64_t slots = on_host_ ? 2 * world_ : world_;
  slot_bytes_ = staging_bytes / slots / kAlign * kAlign;
  if (slot_bytes_ == 0)
    throw zr::PluginError(ZR_INVALID, "communicator.nccl.staging_bytes is " + std::to_string(staging_bytes) +
                                          "; set it to at least " + std::to_string(slots * kAlign) + " for " +
                                          std::to_string(world_) + " ranks");
  staging_ = static_cast<char*>(device_.allocate(slots * slot_bytes_));
  if (!on_host_) return;
  host_staging_ = static_cast<char*>(device_.allocate_host(slots * slot_bytes_));
  host_staging_bytes_ = slots * slot_bytes_;
  host_.need<zr_memory_service>().account(host_.abi(), kTag, host_staging_bytes_);
  stream_ = device_.create_stream();
}

// Memory that a stream may still use stays allocated.
void NcclCommunicator::close_orderly() noexcept {
  bool is_idle = false;
  try {
    Wait waited;
    while (!(is_idle = end_->is_reached()) && !failure_ && !*is_aborted_ && waited.elapsed() < kCloseLimit) {
      if (connection_) connection_->check("");
      waited.pause();
    }
  } catch (const std::exception&) {  // a peer or the device has failed
  }
  try {
    if (!is_idle && connection_) connection_->abort();
    for (Wait waited; !is_idle && waited.elapsed() < kAbortLimit; is_idle = end_->is_reached()) waited.pause();
  } catch (const std::exception&) {  // the device has failed
  }
  connection_.reset();
  for (const auto& pending : pending_) pending->resolve(ZR_CANCELLED, "the communicator was closed");
  if (!is_idle) return;
  if (stream_) device_.destroy_stream(stream_);
  if (staging_) device_.free(staging_);
  if (!host_staging_) return;
  device_.free_host(host_staging_);
  host_.need<zr_memory_service>().account(host_.abi(), kTag, -host_staging_bytes_);
}

void NcclCommunicator::progress() {
  if (connection_) connection_->check(operation_.what());
}

void NcclCommunicator::abort() noexcept {
  *is_aborted_ = true;
  if (connection_) connection_->abort();
}

void NcclCommunicator::check_arguments(bool has_stream) const {
  if (operation_.is_message())
    throw zr::PluginError(ZR_UNSUPPORTED,
                          operation_.what() + ": communicator 'nccl' has no messages with tags; use a collective");
  if (has_stream == on_host_)
    throw zr::PluginError(ZR_INVALID, operation_.what() + (on_host_ ? ": host memory needs a call without a stream"
                                                                    : ": memory of a device needs the stream of the "
                                                                      "call"));
}

void NcclCommunicator::submit(const zr_coll& coll, zr_stream* stream, zr_done* done) {
  operation_.assign(coll, rank_, world_);
  check_arguments(stream != nullptr);
  if (failure_) throw zr::PluginError(failure_->code, failure_->text);
  void* const native = on_host_ ? stream_ : zr::native_stream(host_, stream);
  if (!on_host_ && only_stream_.value_or(native) != native)
    throw zr::PluginError(ZR_UNSUPPORTED, operation_.what() + ": communicator 'nccl' has one stream per device");
  only_stream_ = native;
  try {
    if (*is_aborted_) throw zr::PluginError(ZR_CANCELLED, operation_.what() + ": the communicator was aborted");
    run(native);
  } catch (const std::exception& error) {
    const auto* const known = dynamic_cast<const zr::PluginError*>(&error);
    failure_ = Failure{known ? known->code() : zr_code{ZR_INTERNAL}, error.what()};
    try {
      end_->record(native);  // of what is on the stream already
    } catch (const zr::PluginError&) {
    }
    throw;
  }
  if (!done) return;
  if (on_host_) return zr::Done::retained(host_, done).resolve();
  resolve_on_stream(done, native);
}

// Operations run after those on memory of the device that were submitted before, of any engine of this process and on
// any stream: NCCL may deadlock if the kernels of two communicators run in another order on another rank. Operations on
// host memory are complete when their call returns.
void NcclCommunicator::run(void* stream) {
  sends_.clear();
  receives_.clear();
  copies_.clear();
  downloads_.clear();
  shared_->last_operation->wait(stream);
  if (operation_.coll.op == ZR_BARRIER)
    barrier(stream);
  else if (operation_.coll.op == ZR_BROADCAST)
    broadcast(stream);
  else if (operation_.is_reduction())
    reduce(stream);
  else
    exchange(stream);
  if (on_host_) return;
  end_->record(stream);
  shared_->last_operation->record(stream);
}

void NcclCommunicator::Pending::resolve(zr_code code, const char* text) {
  if (!is_resolved.exchange(true)) done.resolve(code, 0, text);
}

void NcclCommunicator::resolve_on_stream(zr_done* done, void* stream) {
  struct Context {
    std::shared_ptr<Pending> pending;
    std::shared_ptr<const std::atomic<bool>> is_aborted, has_ended;
  };
  pending_.erase(
      std::remove_if(pending_.begin(), pending_.end(), [](const auto& each) { return each->is_resolved.load(); }),
      pending_.end());
  auto context = std::make_unique<Context>(
      Context{std::make_shared<Pending>(), is_aborted_, connection_ ? connection_->has_ended() : is_aborted_});
  context->pending->done = zr::Done::retained(host_, done);
  pending_.push_back(context->pending);
  try {
    device_.call(
        [](void* kept) {
          const std::unique_ptr<Context> own(static_cast<Context*>(kept));
          if (*own->is_aborted)
            own->pending->resolve(ZR_CANCELLED, "the communicator was aborted");
          else if (*own->has_ended)
            own->pending->resolve(ZR_COMM, "NCCL has failed; the next call says why");
          else
            own->pending->resolve(ZR_OK, nullptr);
        },
        context.get(), stream);
  } catch (...) {
    pending_.pop_back();  // a call that fails does not resolve it
    throw;
  }
  static_cast<void>(context.release());  // the call deletes it
}

// After an abort the stream gets there too.
void NcclCommunicator::wait_for(Mark& mark) {
  for (Wait waited; !mark.is_reached(); waited.pause())
    if (connection_) connection_->check(operation_.what());
  if (connection_) connection_->check(operation_.what());
}

// `data` where NCCL and kernels can read it: host memory is copied to the slot.
char* NcclCommunicator::as_source(int number, const char* data, int64_t bytes, void* stream) {
  if (!on_host_) return const_cast<char*>(data);
  std::memcpy(host_slot(number), data, static_cast<size_t>(bytes));
  device_.copy(slot(number), host_slot(number), bytes, stream);
  return slot(number);
}

// Where NCCL or a kernel writes what belongs to `data`: host memory gets it from the slot at the end of the round.
char* NcclCommunicator::as_destination(int number, char* data, int64_t bytes) {
  if (!on_host_) return data;
  downloads_.push_back({data, host_slot(number), bytes});
  return slot(number);
}

// Sends and receives as one group, in which every rank sends to the next ones first.
void NcclCommunicator::transfer(void* stream) {
  if (!sends_.empty() || !receives_.empty())
    connection_->group(operation_.what(), [&](const Functions& nccl, Comm comm) {
      Result result = kSuccess;
      const auto note = [&](Result each) {
        if (result == kSuccess && each != kInProgress) result = each;
      };
      for (const Transfer& t : sends_)
        note(nccl.send(t.data, static_cast<size_t>(t.bytes), kUint8, t.peer, comm, stream));
      for (const Transfer& t : receives_)
        note(nccl.recv(t.data, static_cast<size_t>(t.bytes), kUint8, t.peer, comm, stream));
      return result;
    });
  for (const Copy& copy : copies_) device_.copy(copy.to, copy.from, copy.bytes, stream);
  sends_.clear();
  receives_.clear();
  copies_.clear();
}

// Host memory: waits, so that slots can be used again.
void NcclCommunicator::finish_round(void* stream) {
  if (!on_host_) return;
  for (const Copy& download : downloads_)
    device_.copy(const_cast<char*>(download.from), staging_ + (download.from - host_staging_), download.bytes, stream);
  end_->record(stream);
  wait_for(*end_);
  for (const Copy& download : downloads_) std::memcpy(download.to, download.from, static_cast<size_t>(download.bytes));
  downloads_.clear();
}

void NcclCommunicator::barrier(void* stream) {
  for (int i = 1; i < world_; ++i) {
    const int to = (rank_ + i) % world_, from = (rank_ + world_ - i) % world_;
    sends_.push_back({to, slot(rank_), 1});
    receives_.push_back({from, slot(from), 1});
  }
  transfer(stream);
  finish_round(stream);
}

void NcclCommunicator::broadcast(void* stream) {
  const zr_coll& coll = operation_.coll;
  const bool is_root = coll.root == rank_;
  const int64_t bytes = operation_.dst_bytes(), piece = on_host_ ? slot_bytes_ : std::max<int64_t>(bytes, 1);
  char* const dst = static_cast<char*>(coll.dst.data);
  const char* const src = static_cast<const char*>(coll.src.data);
  for (int64_t first = 0; first < bytes && connection_; first += piece) {
    const int64_t n = std::min(piece, bytes - first);
    const char* const from = is_root ? as_source(rank_, src + first, n, stream) : nullptr;
    char* const to = !is_root ? as_destination(rank_, dst + first, n) : on_host_ ? slot(rank_) : dst + first;
    connection_->group(operation_.what(), [&](const Functions& nccl, Comm comm) {
      return nccl.broadcast(is_root ? from : to, to, static_cast<size_t>(n), kUint8, coll.root, comm, stream);
    });
    finish_round(stream);
  }
  if (is_root && (on_host_ || !connection_)) copy_own_part(stream);
}

// What this rank sends to itself.
void NcclCommunicator::copy_own_part(void* stream) {
  const zr::CollectiveParts& op = operation_;
  if (!op.sends(rank_) || !op.receives(rank_)) return;
  const zr::Extent own = op.extent(rank_, rank_, op.counts.data(), op.recv_counts.data());
  const char* const from = static_cast<const char*>(op.coll.src.data) + own.from * op.width();
  char* const to = static_cast<char*>(op.coll.dst.data) + own.to * op.width();
  if (own.count == 0 || from == to) return;
  if (on_host_) {
    std::memmove(to, from, static_cast<size_t>(own.count * op.width()));
  } else {
    device_.copy(to, from, own.count * op.width(), stream);
  }
}

void NcclCommunicator::gather_equal_parts(void* stream) {
  const int64_t bytes = operation_.src_bytes();
  if (bytes == 0) return;
  connection_->group(operation_.what(), [&](const Functions& nccl, Comm comm) {
    return nccl.all_gather(operation_.coll.src.data, operation_.coll.dst.data, static_cast<size_t>(bytes), kUint8, comm,
                           stream);
  });
}

// Adds the elements [first, first + piece) of the part for rank `to` to this round's sends. `common`: what all
// receivers get, unless the parts are cut; null before the first one.
void NcclCommunicator::send_part(int to, int64_t first, int64_t piece, char*& common, void* stream) {
  const zr::CollectiveParts& op = operation_;
  if (!op.sends(rank_) || !op.receives(to)) return;
  const zr::Extent part = slice(op.extent(rank_, to, op.counts.data(), op.recv_counts.data()), first, piece);
  if (part.count == 0) return;
  const char* const data = static_cast<const char*>(op.coll.src.data) + part.from * op.width();
  if (op.is_cut() || !common) common = as_source(world_ + to, data, part.count * op.width(), stream);
  sends_.push_back({to, common, part.count * op.width()});
}

// Adds these elements of the part from rank `from` to this round's receives. In a swap, sends read the memory of dst.
void NcclCommunicator::receive_part(int from, int64_t first, int64_t piece) {
  const zr::CollectiveParts& op = operation_;
  if (!op.receives(rank_) || !op.sends(from)) return;
  const bool is_swap = op.coll.op == ZR_ALL_TO_ALL && op.in_place && !on_host_;
  zr::Extent part = op.extent(from, rank_, op.counts.data(), op.recv_counts.data());
  if (op.coll.op == ZR_ALL_TO_ALL) part.count = op.recv_counts[static_cast<size_t>(from)];
  part = slice(part, first, piece);
  if (part.count == 0) return;
  char* const data = static_cast<char*>(op.coll.dst.data) + part.to * op.width();
  const int64_t bytes = part.count * op.width();
  receives_.push_back({from, is_swap ? slot(from) : as_destination(from, data, bytes), bytes});
  if (is_swap) copies_.push_back({data, slot(from), bytes});
}

// Gathers, scatter, all_to_all: each part directly from its source to its destination. Parts are cut for slots on all
// ranks if one of them may use slots: for host memory, and in an all_to_all, which is in place on some of the ranks.
void NcclCommunicator::exchange(void* stream) {
  const zr::CollectiveParts& op = operation_;
  const std::vector<int64_t>&counts = op.counts, &recv_counts = op.recv_counts;
  const bool is_equal = std::all_of(counts.begin(), counts.end(), [&](int64_t n) { return n == counts[0]; });
  if (op.coll.op == ZR_ALL_GATHER && is_equal && !on_host_ && connection_) return gather_equal_parts(stream);
  const bool uses_slots = on_host_ || op.coll.op == ZR_ALL_TO_ALL;
  const int64_t longest = std::max(*std::max_element(counts.begin(), counts.end()),
                                   *std::max_element(recv_counts.begin(), recv_counts.end()));
  const int64_t piece = uses_slots ? slot_bytes_ / op.width() : std::max<int64_t>(longest, 1);
  for (int64_t first = 0; first < longest; first += piece) {
    char* common = nullptr;  // what all receivers get
    for (int i = 1; i < world_; ++i) {
      send_part((rank_ + i) % world_, first, piece, common, stream);
      receive_part((rank_ + world_ - i) % world_, first, piece);
    }
    transfer(stream);
    finish_round(stream);
  }
  copy_own_part(stream);
}

// The elements that a rank reduces: `from` in src, `to` in its dst. Of an all_reduce, each rank reduces a share for all
// ranks; with ACCUMULATE the results differ between ranks, and each rank reduces all. Of a reduce, only the root knows
// dst and its type.
zr::Extent NcclCommunicator::reduced_by(int rank) const {
  const zr_coll& coll = operation_.coll;
  const int64_t n = coll.src.count;
  if (coll.op == ZR_REDUCE_SCATTER) return operation_.extent(0, rank, nullptr, nullptr);
  if (coll.op == ZR_REDUCE) return rank == coll.root ? zr::Extent{0, n, 0} : zr::Extent{};
  if (coll.flags & ZR_COLL_ACCUMULATE) return {0, n, 0};
  const auto cut = [&](int64_t i) {
    return std::min(n, zr::round_up<int64_t>(n / world_ * i + n % world_ * i / world_, 64));
  };
  return {cut(rank), cut(rank + 1) - cut(rank), cut(rank)};
}

void NcclCommunicator::reduce(void* stream) {
  const zr_dtype src = operation_.coll.src.dtype;
  const int64_t width = zr::size_of(src);
  // The dst of another rank may be fp32.
  const int64_t piece = slot_bytes_ / (src == ZR_BF16 || src == ZR_F16 ? 4 : width);
  int64_t longest = 0;
  for (int r = 0; r < world_; ++r) longest = std::max(longest, reduced_by(r).count);
  for (int64_t first = 0; first < longest; first += piece) reduce_round(first, piece, stream);
}

void NcclCommunicator::reduce_round(int64_t first, int64_t piece, void* stream) {
  const zr_coll& coll = operation_.coll;
  const int64_t width = zr::size_of(coll.src.dtype), dst_width = zr::size_of(coll.dst.dtype);
  const bool accumulates = coll.flags & ZR_COLL_ACCUMULATE;
  const bool is_shared = coll.op == ZR_ALL_REDUCE && !accumulates;
  const bool is_cut = is_shared || coll.op == ZR_REDUCE_SCATTER;  // each rank reduces other elements
  const zr::Extent own = slice(reduced_by(rank_), first, piece);
  const auto source = [&](int number, const zr::Extent& part) {
    return as_source(number, static_cast<const char*>(coll.src.data) + part.from * width, part.count * width, stream);
  };
  char* own_source = own.count > 0 ? source(rank_, own) : nullptr;
  for (int i = 1; i < world_; ++i) {
    const int to = (rank_ + i) % world_, from = (rank_ + world_ - i) % world_;
    const zr::Extent part = slice(reduced_by(to), first, piece);
    if (part.count > 0) {
      char* data = is_cut ? source(world_ + to, part) : own_source;
      if (!data) data = own_source = source(rank_, part);
      sends_.push_back({to, data, part.count * width});
    }
    if (own.count > 0) receives_.push_back({from, slot(from), own.count * width});
  }
  transfer(stream);
  char* result = nullptr;
  if (own.count > 0) {
    char* const dst = static_cast<char*>(coll.dst.data) + own.to * dst_width;
    if (accumulates) as_source(world_ + rank_, dst, own.count * dst_width, stream);
    result = as_destination(world_ + rank_, dst, own.count * dst_width);
    sources_.clear();
    for (int p = 0; p < world_; ++p) sources_.push_back(p == rank_ ? own_source : slot(p));
    device_.reduce({coll.reduce, accumulates, coll.src.dtype, coll.dst.dtype}, sources_.data(), world_, result,
                   own.count, stream);
  }
  if (is_shared) share_results(first, piece, result, stream);
  finish_round(stream);
}

// The second half of an all_reduce: every rank sends its part of the result to all.
void NcclCommunicator::share_results(int64_t first, int64_t piece, char* own, void* stream) {
  const int64_t width = zr::size_of(operation_.coll.dst.dtype);
  const int64_t own_bytes = slice(reduced_by(rank_), first, piece).count * width;
  for (int i = 1; i < world_; ++i) {
    const int to = (rank_ + i) % world_, from = (rank_ + world_ - i) % world_;
    const zr::Extent part = slice(reduced_by(from), first, piece);
    char* const data = static_cast<char*>(operation_.coll.dst.data) + part.to * width;
    if (own_bytes > 0) sends_.push_back({to, own, own_bytes});
    if (part.count > 0) receives_.push_back({from, as_destination(from, data, part.count * width), part.count * width});
  }
  transfer(stream);
}

}  // namespace nccl
