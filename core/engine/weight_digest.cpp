#include "engine/weight_digest.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "checkpoint/manifest.hpp"
#include "engine/rank_differences.hpp"

namespace zr::host::engine {

namespace {
constexpr int64_t kShare = 200;                   // one of this many bytes that the optimizer touches is digested
constexpr int64_t kMinElements = 64;              // the smallest turn; a smaller one is added to the next step's
constexpr int64_t kGathered = int64_t{64} << 10;  // bytes of parts on a device that are read at a time
}  // namespace

WeightDigest::WeightDigest(const plan::MemoryPlan& plan, const std::vector<void*>& buffers,
                           const std::vector<const void*>& readers, int world, DeviceMemory* device)
    : plan_(plan),
      world_(world),
      device_(world > 1 ? device : nullptr),
      gathered_(device_ ? device_->allocate(kGathered) : nullptr) {
  const auto& parameters = plan.input.parameters;
  memory_.assign(parameters.size(), nullptr);
  if (world > 1)
    for (const plan::Piece& piece : plan.rank_plan.weights)
      if (!piece.shard && piece.count == parameters[piece.param].count && piece.count > 0 &&
          (!readers[piece.buffer] || plan.input.several_hosts()))
        memory_[piece.param] =
            static_cast<const char*>(buffers[piece.buffer]) + piece.offset * size_of_weight(piece.param);
  for (uint32_t i = 0; i < parameters.size(); ++i) {
    if (memory_[i]) replicated_.push_back(i);
    largest_size_ = std::max(largest_size_, size_of_weight(i));
    const int64_t per_element =
        size_of_weight(i) + size_of(plan.input.reduced_grad_dtype) + (plan.has_master_of(i) ? 4 : 0);
    int64_t bytes = 0;
    for (const plan::Segment& segment : plan.segments[i]) {
      int64_t of_segment = segment.count * per_element;
      for (const zr_slot& slot : plan.input.description(i).slots)
        of_segment += plan::state_shape(parameters[i], slot).of(segment.count) * size_of(slot.dtype);
      bytes += of_segment * std::ssize(segment.owners);
    }
    state_bytes_.push_back(parameters[i].frozen ? 0 : bytes);
  }
}

// From the device through `gathered_`, so that the host waits once per kGathered bytes.
std::vector<uint64_t> WeightDigest::digests_of(const std::vector<DigestRange>& parts) {
  std::vector<checkpoint::Hash> hashes(parts.size());
  std::vector<char> copy(device_ && !parts.empty() ? kGathered : 0);
  struct Piece {
    std::size_t part;
    int64_t at, bytes;  // in `copy`
  };
  std::vector<Piece> pieces;
  int64_t used = 0;
  const auto take = [&] {
    if (used > 0) device_->download(gathered_, copy.data(), used);
    for (const Piece& piece : pieces) hashes[piece.part].add(copy.data() + piece.at, piece.bytes);
    pieces.clear();
    used = 0;
  };
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const int64_t size = size_of_weight(parts[i].param), bytes = parts[i].count * size;
    const char* const from = memory_[parts[i].param] + parts[i].first * size;
    bytes_ += bytes;
    if (!device_) hashes[i].add(from, bytes);
    for (int64_t done = 0; device_ && done < bytes;) {
      if (used == kGathered) take();
      const int64_t n = std::min(bytes - done, kGathered - used);
      const auto bytes_at = [&](const char* memory) {
        return zr_view{const_cast<char*>(memory), n, ZR_U8, 0, device_->device()};
      };
      device_->copy(bytes_at(from + done), bytes_at(static_cast<char*>(gathered_) + used));
      pieces.push_back({i, used, n});
      used += n;
      done += n;
    }
  }
  take();
  std::vector<uint64_t> digests;
  for (const checkpoint::Hash& hash : hashes) digests.push_back(hash.value());
  return digests;
}

void WeightDigest::take_turn(int64_t elements) {
  while (elements > 0) {
    const uint32_t param = replicated_[at_];
    const int64_t n = std::min(elements, plan_.input.parameters[param].count - element_);
    turn_.push_back({param, element_, n});
    elements -= n;
    element_ += n;
    if (element_ < plan_.input.parameters[param].count) continue;
    element_ = 0;
    if (++at_ < replicated_.size()) continue;
    at_ = 0;
    ++cycles_;
    return;  // digests no weight twice in a step
  }
}

WeightDigest::~WeightDigest() {
  if (device_) device_->free(gathered_);
}

uint64_t WeightDigest::digest_all(const std::vector<DigestRange>& parts) {
  const std::vector<uint64_t> digests = digests_of(parts);
  return digests.empty() ? 0 : checkpoint::hash_of(digests.data(), std::ssize(digests) * int64_t{sizeof(uint64_t)});
}

WeightDigest::Digest WeightDigest::next(std::map<uint32_t, uint64_t> gathered_writes) {
  turn_.clear();
  written_parts_.clear();
  compared_.clear();
  for (const uint32_t param : written_)
    if (memory_[param]) compared_.insert(param);
  written_.clear();
  gathered_writes_ = std::move(gathered_writes);
  Digest result;
  result.written = digest_of_writes();
  if (replicated_.empty()) return result;
  for (const uint32_t param : compared_) written_parts_.push_back({param, 0, plan_.input.parameters[param].count});
  result.values = digest_all(written_parts_);
  // The turn depends only on values that are the same on all ranks.
  const int64_t elements = (optimizer_bytes_ / world_ / kShare - turn_bytes_) / largest_size_;
  if (elements >= kMinElements) take_turn(elements);
  for (const DigestRange& part : turn_) turn_bytes_ += part.count * size_of_weight(part.param);
  result.weights = digest_all(turn_);
  return result;
}

uint64_t WeightDigest::digest_of_writes() const {
  if (compared_.empty() && gathered_writes_.empty()) return 0;
  checkpoint::Hash hash;
  for (const uint32_t param : compared_) hash.add(&param, sizeof param);
  for (const auto& [param, values] : gathered_writes_) {
    hash.add(&param, sizeof param);
    hash.add(&values, sizeof values);
  }
  return hash.value();
}

// The parameters that any rank wrote to, in full. Collective.
std::vector<WeightDigest::DigestRange> WeightDigest::all_written(comm::CommRuntime& comm) const {
  std::string written(memory_.size(), 0);
  for (const uint32_t param : compared_) written[param] = 1;
  std::set<uint32_t> any;
  for (const std::string& other : comm.all_gather_bytes(written, "written parameters"))
    for (uint32_t i = 0; i < other.size(); ++i)
      if (other[i]) any.insert(i);
  std::vector<DigestRange> parts;
  for (const uint32_t param : any) parts.push_back({param, 0, plan_.input.parameters[param].count});
  return parts;
}

// The parts whose common digest differs between ranks. Collective if the ranks wrote to different parameters.
std::vector<WeightDigest::DigestRange> WeightDigest::suspected_parts(const std::vector<Digest>& digests,
                                                                     comm::CommRuntime& comm) const {
  const auto differ = [&](auto member) {
    return std::any_of(digests.begin(), digests.end(),
                       [&](const Digest& other) { return other.*member != digests[0].*member; });
  };
  std::vector<DigestRange> parts;
  if (differ(&Digest::written))  // then the digests of values differ too
    parts = all_written(comm);
  else if (differ(&Digest::values))
    parts = written_parts_;
  if (differ(&Digest::weights)) parts.insert(parts.end(), turn_.begin(), turn_.end());
  return parts;
}

// Fails if ranks wrote to different sharded parameters, or other values. Collective.
void WeightDigest::compare_gathered_writes(comm::CommRuntime& comm, int64_t step) {
  constexpr std::size_t kBytes = 1 + sizeof(uint64_t);  // of a parameter: whether it was written to, and the hash
  std::string own(memory_.size() * kBytes, '\0');
  for (const auto& [param, hash] : gathered_writes_) {
    own[param * kBytes] = 1;
    std::memcpy(&own[param * kBytes + 1], &hash, sizeof hash);
  }
  const std::vector<std::string> by_rank = comm.all_gather_bytes(own, "writes to sharded parameters");
  for (uint32_t param = 0; param < memory_.size(); ++param) {
    RanksByDigest ranks;
    std::vector<int> writers, others;
    for (int rank = 0; rank < world_; ++rank) {
      const std::string write = by_rank[static_cast<std::size_t>(rank)].substr(param * kBytes, kBytes);
      (write[0] ? writers : others).push_back(rank);
      ranks[write].push_back(rank);
    }
    if (!writers.empty() && !others.empty())
      rejected_[param] = {fmt::format("{} wrote values that {} did not write", list_of(writers), list_of(others)),
                          step};
    else if (ranks.size() > 1)
      rejected_[param] = {difference_between(ranks, true), step};
    else if (!writers.empty())
      rejected_.erase(param);  // all ranks have stored shards of the same values
  }
}

// The first or last element of the part, which differs, that does. Collective.
int64_t WeightDigest::different_element(DigestRange part, bool last, comm::CommRuntime& comm) {
  constexpr int64_t kBlocks = 256;
  while (part.count > 1) {
    const int64_t size = (part.count + kBlocks - 1) / kBlocks;
    std::vector<DigestRange> blocks;
    for (int64_t at = 0; at < part.count; at += size)
      blocks.push_back({part.param, part.first + at, std::min(size, part.count - at)});
    if (last) std::reverse(blocks.begin(), blocks.end());
    const std::vector<uint64_t> own = digests_of(blocks);
    const std::vector<std::string> all = comm.all_gather_bytes(
        {reinterpret_cast<const char*>(own.data()), own.size() * sizeof(uint64_t)}, "digests of elements");
    std::size_t i = 0;
    const auto differs = [&](const std::string& other) { return other.compare(i * 8, 8, all[0], i * 8, 8) != 0; };
    while (i + 1 < blocks.size() && std::ranges::none_of(all, differs)) ++i;
    part = blocks[i];
  }
  return part.first;
}

void WeightDigest::compare(const std::vector<Digest>& digests, comm::CommRuntime& comm, int64_t step) {
  if (std::ranges::any_of(digests, [&](const Digest& other) { return other.written != digests[0].written; }))
    compare_gathered_writes(comm, step);
  else
    for (const auto& [param, hash] : gathered_writes_) rejected_.erase(param);
  if (!rejected_.empty()) {
    const auto& [param, rejected] = *rejected_.begin();
    fail({param, 0, plan_.input.parameters[param].count}, rejected.difference, rejected.step);
  }
  const std::vector<DigestRange> parts = suspected_parts(digests, comm);
  if (parts.empty()) return;
  std::string digests_of_rank;
  for (const uint64_t digest : digests_of(parts))
    digests_of_rank.append(reinterpret_cast<const char*>(&digest), sizeof digest);
  const std::vector<std::string> digests_by_rank = comm.all_gather_bytes(digests_of_rank, "digests of weights");
  for (std::size_t i = 0; i < parts.size(); ++i) {
    RanksByDigest ranks;
    for (std::size_t r = 0; r < digests_by_rank.size(); ++r)
      ranks[digests_by_rank[r].substr(i * 8, 8)].push_back(static_cast<int>(r));
    if (ranks.size() < 2) continue;
    for (const DigestRange& part : parts) written_.insert(part.param);  // compared in full until they are equal
    const int64_t first = different_element(parts[i], false, comm), end = different_element(parts[i], true, comm) + 1;
    fail({parts[i].param, first, end - first}, difference_between(ranks), step);
  }
}

void WeightDigest::fail(const DigestRange& part, const std::string& difference, int64_t step) const {
  fail_weights_differ({plan_.input.parameters[part.param], part.first, part.count, difference},
                      fmt::format("found in step {}", step));
}

void WeightDigest::updated(const std::vector<char>& touched) {
  for (std::size_t i = 0; i < touched.size(); ++i)
    if (touched[i]) optimizer_bytes_ += state_bytes_[i];
}

}  // namespace zr::host::engine
