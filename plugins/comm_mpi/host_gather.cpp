#include "host_gather.hpp"

#include <cstring>

namespace mpi {

namespace {
bool is_shared(const zr::CollectiveParts& parts) { return (parts.coll.flags & ZR_COLL_SHARED) != 0; }

// Encoded values have their place in the memory of the values.
bool passes_encoded(const zr::CollectiveParts& parts, int64_t count) {
  const zr_dtype dtype = parts.coll.dst.dtype;
  return parts.coll.op == ZR_ALL_GATHER && !is_shared(parts) && bits_of(parts.coll) != 0 && count >= kFewest &&
         (dtype == ZR_F32 || dtype == ZR_BF16 || dtype == ZR_F16);
}
}  // namespace

bool HostGather::suits(const zr::CollectiveParts& parts) {
  return parts.coll.op == ZR_ALL_GATHER || parts.coll.op == ZR_BROADCAST;
}

int64_t HostGather::part_bytes(const zr::CollectiveParts& parts, int64_t count) {
  return passes_encoded(parts, count) ? encoded_bytes(bits_of(parts.coll), count)
                                      : count * zr::size_of(parts.coll.dst.dtype);
}

void HostGather::start(Channel& channel) {
  has_started_ = true;
  channel.local->begin(number_);
  if (parts_.coll.op != ZR_ALL_GATHER)
    start_broadcast(channel);
  else if (is_shared(parts_))
    list_shared(channel);
  else
    list_gathers(channel);
  advance(channel);
}

// A quantized part is encoded in dst. When it has left, it is moved to the end of its memory there, and decoded.
void HostGather::send_own_part(Channel& channel) {
  const Hosts& hosts = channel.hosts;
  const zr_coll& coll = parts_.coll;
  const int own_host = hosts.of(parts_.rank);
  const bool is_encoded = passes_encoded(parts_, coll.src.count);
  const int64_t bytes = part_bytes(parts_, coll.src.count);
  const void* leaves = coll.src.data;
  if (is_encoded) {
    const int64_t width = zr::size_of(coll.dst.dtype);
    void* const to = static_cast<char*>(coll.dst.data) + parts_.starts[static_cast<std::size_t>(parts_.rank)] * width;
    channel.quantization.encode(bits(), coll.src.dtype, coll.src.data, coll.src.count, to);
    leaves = to;
  }
  Requests& requests = is_encoded ? steps_[static_cast<std::size_t>(own_host)].arriving : whole_;
  for (int host = 0; host < hosts.count(); ++host)
    if (host != own_host) send_part(channel, requests, leaves, bytes, hosts.helper(host, parts_.rank), Phase::parts);
}

// The parts of each host are one range of dst. A rank contributes to it what it has received: adjacent parts.
void HostGather::list_gathers(Channel& channel) {
  const Hosts& hosts = channel.hosts;
  const zr_coll& coll = parts_.coll;
  const int64_t width = zr::size_of(coll.dst.dtype);
  const int own_host = hosts.of(parts_.rank);
  char* const dst = static_cast<char*>(coll.dst.data);
  for (int host = 0; host < hosts.count(); ++host) {
    Step step;
    const int64_t begin = parts_.starts[static_cast<std::size_t>(hosts.first(host))];
    const int64_t end = parts_.starts[static_cast<std::size_t>(hosts.first(host + 1))];
    int64_t own = begin, own_count = 0;
    step.counts.assign(static_cast<std::size_t>(hosts.size(own_host)), 0);
    for (int rank = hosts.first(host); rank < hosts.first(host + 1); ++rank) {
      const int helper = hosts.helper(own_host, rank);
      const int64_t count = parts_.counts[static_cast<std::size_t>(rank)];
      step.counts[static_cast<std::size_t>(helper - hosts.first(own_host))] += count;
      if (helper < parts_.rank) own += count;
      if (helper != parts_.rank) continue;
      const zr_view part{dst + (own + own_count) * width, count, coll.dst.dtype, 0, coll.dst.device};
      const bool is_encoded = passes_encoded(parts_, count);
      if (is_encoded) step.encoded.push_back(part);
      if (host != own_host) {
        const int64_t bytes = part_bytes(parts_, count);
        receive_part(channel, step.arriving, static_cast<char*>(part.data) + count * width - bytes, bytes, rank,
                     Phase::parts);
      }
      own_count += count;
    }
    step.coll.op = ZR_ALL_GATHER;
    step.coll.src = {dst + own * width, own_count, coll.dst.dtype, 0, coll.dst.device};
    if (host == own_host && !passes_encoded(parts_, coll.src.count)) step.coll.src = coll.src;
    step.coll.dst = {dst + begin * width, end - begin, coll.dst.dtype, 0, coll.dst.device};
    steps_.push_back(std::move(step));
  }
  send_own_part(channel);
}

// The ranks of this host receive the parts of the others, and wait for each other.
void HostGather::list_shared(Channel& channel) {
  const Hosts& hosts = channel.hosts;
  const zr_coll& coll = parts_.coll;
  const int64_t width = zr::size_of(coll.dst.dtype);
  const int own_host = hosts.of(parts_.rank);
  Step& step = steps_.emplace_back();
  step.coll.op = ZR_BARRIER;
  for (int rank = 0; rank < parts_.world; ++rank) {
    if (hosts.of(rank) == own_host || hosts.helper(own_host, rank) != parts_.rank) continue;
    const auto r = static_cast<std::size_t>(rank);
    const int64_t bytes = parts_.counts[r] * width;
    receive_part(channel, step.arriving, static_cast<char*>(coll.dst.data) + parts_.starts[r] * width, bytes, rank,
                 Phase::parts);
  }
  send_own_part(channel);
}

void HostGather::start_broadcast(Channel& channel) {
  const Hosts& hosts = channel.hosts;
  const zr_coll& coll = parts_.coll;
  const int own_host = hosts.of(parts_.rank), home = hosts.of(coll.root), helper = hosts.helper(own_host, coll.root);
  Step step;
  if (parts_.rank == coll.root) {
    for (int host = 0; host < hosts.count(); ++host)
      if (host != home)
        send_part(channel, whole_, coll.src.data, parts_.src_bytes(), hosts.helper(host, coll.root), Phase::parts);
  } else if (parts_.rank == helper) {
    receive_part(channel, step.arriving, coll.dst.data, parts_.dst_bytes(), coll.root, Phase::parts);
  }
  step.coll.op = ZR_BROADCAST;
  step.coll.root = helper - hosts.first(own_host);
  step.coll.dst = coll.dst;
  step.coll.src = parts_.rank == coll.root ? coll.src : coll.dst;
  steps_.push_back(std::move(step));
}

// What has arrived, or this rank's own part, which was encoded at the beginning of its memory.
void HostGather::decode(const Channel& channel, const Step& step) const {
  if (step.encoded.empty()) return;
  const bool is_own = &step == &steps_[static_cast<std::size_t>(channel.hosts.of(parts_.rank))];
  for (const zr_view& part : step.encoded) {
    const int64_t bytes = encoded_bytes(bits(), part.count);
    auto* const begin = static_cast<char*>(part.data);
    char* const from = begin + part.count * zr::size_of(part.dtype) - bytes;
    if (is_own) std::memmove(from, begin, static_cast<std::size_t>(bytes));
    channel.quantization.decode(bits(), from, part.dtype, part.count, begin);
  }
}

bool HostGather::advance(Channel& channel) {
  channel.local->progress();
  const bool moved = submit_steps(channel);
  if (submitted_ < steps_.size() || !running_.empty() || !whole_.complete(parts_.what())) return moved;
  is_complete_ = true;
  return true;
}

bool HostGather::submit_steps(Channel& channel) {
  bool moved = false;
  while (!running_.empty() && running_.front().ready()) {
    running_.pop_front();
    moved = true;
  }
  while (submitted_ < steps_.size() && channel.local->is_turn(number_) &&
         steps_[submitted_].arriving.complete(parts_.what())) {
    Step& step = steps_[submitted_];
    decode(channel, step);
    ++submitted_;
    step.coll.size = sizeof step.coll;
    step.coll.counts = step.counts.empty() ? nullptr : step.counts.data();
    step.coll.label = parts_.label.c_str();
    step.coll.fingerprint = parts_.coll.fingerprint * 31 + submitted_;
    running_.push_back(channel.local->submit(step.coll));
    moved = true;
    if (submitted_ == steps_.size()) channel.local->end(number_);
  }
  return moved;
}

}  // namespace mpi
