#include "engine/agreement.hpp"

#include <cmath>
#include <cstring>
#include <numeric>

#include "base/failure.hpp"
#include "shard/norm.hpp"

namespace zr::host {

namespace {
int64_t leaves_of(int64_t count) { return (count + kLeaf - 1) / kLeaf; }
}  // namespace

Agreement::Agreement(Communicator& comm, Pool& pool, const Plan& plan, const std::vector<Unit>& units)
    : comm_(comm), pool_(pool), plan_(plan), units_(units) {
  const auto world = static_cast<std::size_t>(plan.input.world);
  provides_.resize(world);
  counts_.assign(world, 0);
  bool everywhere = true;
  for (std::size_t i = 0; i < plan.input.parameters.size(); ++i) {
    first_leaf_.push_back(leaves_);
    const Parameter& parameter = plan.input.parameters[i];
    if (parameter.frozen) continue;
    for (const Segment& segment : plan.segments[i]) {
      const auto owner = static_cast<std::size_t>(segment.owners.front());
      provides_[owner].push_back({leaves_ + segment.first / kLeaf, leaves_of(segment.count)});
      counts_[owner] += leaves_of(segment.count);
      everywhere &= segment.owners.size() == world;
    }
    leaves_ += leaves_of(parameter.count);
  }
  all_.assign(static_cast<std::size_t>(leaves_), 0.0);
  bytes_ = leaves_ * 8;
  if (everywhere) {
    provides_.clear();
    return;
  }
  const int64_t mine = counts_[static_cast<std::size_t>(plan.rank)];
  sent_ = static_cast<double*>(
      comm_.allocate(std::max<int64_t>(mine, 1) * 8, 64, Tier::device, Kind::other, "norm leaves"));
  received_ = static_cast<double*>(comm_.allocate(leaves_ * 8, 64, Tier::device, Kind::other, "norm leaves"));
  bytes_ += (std::max<int64_t>(mine, 1) + leaves_) * 8;
}

Agreement::~Agreement() {
  comm_.free(sent_);
  comm_.free(received_);
}

void Agreement::exchange_leaves() {
  if (provides_.empty()) return;
  const auto rank = static_cast<std::size_t>(plan_.rank);
  double* at = sent_;
  for (const Run& run : provides_[rank]) {
    std::copy_n(all_.data() + run.leaf, run.count, at);
    at += run.count;
  }
  zr_coll gather{};
  gather.op = ZR_ALL_GATHER;
  gather.src = {sent_, counts_[rank], ZR_F64, 0, {1, 0}};
  gather.dst = {received_, leaves_, ZR_F64, 0, {1, 0}};
  gather.counts = counts_.data();
  gather.label = "norm leaves";
  comm_.run_control(gather);
  const double* from = received_;
  for (const auto& runs : provides_)
    for (const Run& run : runs) {
      std::copy_n(from, run.count, all_.data() + run.leaf);
      from += run.count;
    }
}

namespace {
// One rank's words, as bytes: the same length on all ranks.
struct Header {
  int64_t non_finite, tokens;
};

std::string encode(const Agreement::Mine& mine, int64_t non_finite) {
  const Header header{non_finite, mine.tokens};
  std::string bytes(reinterpret_cast<const char*>(&header), sizeof header);
  for (const auto* list : {&mine.losses, &mine.weights})
    bytes.append(reinterpret_cast<const char*>(list->data()), list->size() * sizeof(double));
  bytes.append(mine.touched->data(), mine.touched->size());
  return bytes;
}
}  // namespace

Agreed Agreement::reach(const Mine& mine) {
  std::vector<LeafRun> runs;
  for (const Unit& unit : units_)
    runs.push_back({static_cast<const float*>(unit.sum.data), unit.count,
                    all_.data() + first_leaf_[unit.param] + unit.first / kLeaf});
  leaf_sums(pool_, runs);
  int64_t non_finite = 0;
  for (const LeafRun& run : runs)
    for (int64_t leaf = 0; leaf < leaves_of(run.count); ++leaf)
      if (!std::isfinite(run.out[leaf]))
        non_finite += count_non_finite(run.values + leaf * kLeaf, std::min(kLeaf, run.count - leaf * kLeaf));

  const auto words = comm_.all_gather_bytes(encode(mine, non_finite), "agreement");
  Agreed agreed;
  agreed.touched.assign(mine.touched->size(), 0);
  const std::size_t micros = mine.losses.size();
  double loss = 0;
  for (std::size_t a = 0; a < micros; ++a)
    for (const std::string& word : words) {  // m = a N + r, ascending
      double value, weight;
      std::memcpy(&value, word.data() + sizeof(Header) + a * 8, 8);
      std::memcpy(&weight, word.data() + sizeof(Header) + (micros + a) * 8, 8);
      loss += weight == 1 ? value : value * weight;
      agreed.weight += weight;
    }
  for (const std::string& word : words) {
    Header header;
    std::memcpy(&header, word.data(), sizeof header);
    // Ranks that hold the same sums count the same elements.
    agreed.non_finite =
        provides_.empty() ? std::max(agreed.non_finite, header.non_finite) : agreed.non_finite + header.non_finite;
    agreed.tokens += header.tokens;
    const char* touched = word.data() + sizeof(Header) + 2 * micros * 8;
    for (std::size_t i = 0; i < agreed.touched.size(); ++i) agreed.touched[i] |= touched[i];
  }
  agreed.loss = loss / agreed.weight;
  exchange_leaves();
  agreed.sum_of_squares = std::accumulate(all_.begin(), all_.end(), 0.0);
  return agreed;
}

}  // namespace zr::host
